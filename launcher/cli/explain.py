"""mrl explain: why a run does not learn."""

from __future__ import annotations

import json
import textwrap
from typing import Any

import click

from launcher.cli.arguments import RUN
from launcher.cli.show.ending import failure_lines
from launcher.explain.explanation import RULES, Explanation, explain
from launcher.explain.record import Record, read_record
from launcher.runs.find import find
from megatron_rl.contract.learning import WINDOW
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.text import printable_lines

WIDTH = 110
SHOWN = {
    "mean_reward": "reward",
    "loss": "loss",
    "nonzero_groups_ratio": "groups with signal",
    "truncated_ratio": "answers cut off",
    "answer_length": "tokens an answer",
    "entropy": "entropy, nats",
    "clip_fraction": "clipped tokens",
    "inference_logprob_difference": "engine's difference, nats",
    "grad_norm": "gradient norm",
}


@click.command("explain")
@RUN
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: {run, step, failure, findings, rules}.")
def command(run: str | None, as_json: bool) -> None:
    """Print how RUN failed, if it did, and what may keep it from learning by rules over its recipe and its record:
    evidence, and keys to try. Nothing of the run changes; it may be running.

    RUN is a run's name, its directory, its job id, or nothing for the newest. docs/run-directory.md lists the rules.

    \b
    Exit codes: 0 printed, whether anything was found or not  1 the record cannot be read  2 no such run
    """
    found = find(run)
    record = read_record(found)
    explanation = explain(found, record)
    if as_json:
        click.echo(json.dumps(explanation_json(found, explanation)))
    else:
        click.echo(printable_lines("\n".join(explanation_lines(found, record, explanation))))


def explanation_lines(run: RunDir, record: Record, explanation: Explanation) -> list[str]:
    lines = [f"{run.root.name}: {explanation.steps} of {record.key('training.steps', int)} steps"]
    if explanation.failure is not None:
        lines += ["", *failure_lines(explanation.failure), ""]
    changes = {label: record.change(name) for name, label in SHOWN.items()}
    known = [f"  {label:<26} {its[0]:>9.4g} -> {its[1]:.4g}" for label, its in changes.items() if its]
    if known:
        known[0] += f"   (means of the first and the last {WINDOW} steps)"
    lines += known
    for one in explanation.findings:
        lines += ["", one.name if one.since is None else f"{one.name}, since step {one.since}"]
        lines += [*_wrapped("seen", one.seen + "."), *_wrapped("try", one.advice)]
    if explanation.remark:
        lines += ["", *_wrapped("", explanation.remark)]
    return lines


def explanation_json(run: RunDir, explanation: Explanation) -> dict[str, Any]:
    failure = explanation.failure
    return {
        "run": str(run.root),
        "step": explanation.steps,
        "failure": None if failure is None else {"message": failure.message, "log": str(failure.log)},
        "findings": [
            {"rule": one.name, "since": one.since, "seen": one.seen, "try": one.advice} for one in explanation.findings
        ],
        "rules": [*RULES],
    }


def _wrapped(label: str, text: str) -> list[str]:
    first = f"  {label:<5} " if label else "  "
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=" " * len(first), break_on_hyphens=False)
