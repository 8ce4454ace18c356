"""Output of `mrl explain`."""

from __future__ import annotations

import textwrap
from typing import Any

from launcher.cli.show.ending import failure_lines
from launcher.explain.explanation import RULES, Explanation
from launcher.explain.record import Record
from megatron_rl.contract.learning import WINDOW
from megatron_rl.contract.paths import RunDir

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


def explanation_lines(run: RunDir, record: Record, explanation: Explanation, *, every: bool) -> list[str]:
    """Return the text for people: how the run failed, what the rules find, and what they compare.

    every: whether to name the rules that found nothing.
    """
    lines = [f"{run.root.name}: {explanation.steps} of {record.key('training.steps')} steps"]
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
    if every:
        lines += ["", "without a finding:", *_wrapped("", ", ".join(explanation.quiet))]
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
