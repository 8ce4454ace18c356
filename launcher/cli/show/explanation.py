"""Output of `mrl explain`."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from launcher.explain.record import Record
from launcher.explain.rules import RULES, Finding
from megatron_rl.contract.learning import RULES as WARNING_RULES
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
"""Metrics shown with their means over the first and the last steps."""


def explanation_lines(run: RunDir, record: Record, found: Sequence[Finding], *, every: bool) -> list[str]:
    """Return the text for people.

    every: whether to name the rules that found nothing.
    """
    steps = len(record.lines)
    lines = [f"{run.root.name}: {steps} of {record.key('training.steps')} steps"]
    if steps < WINDOW:
        return [*lines, f"  too early: the rules compare {WINDOW} steps; so far nothing can be said about learning"]
    for name, label in SHOWN.items():
        first, last = record.first(name), record.last(name)
        if first is not None and last is not None:
            lines.append(f"  {label:<26} {first:>9.4g} -> {last:.4g}")
    lines[1] += f"   (means of the first and the last {WINDOW} steps)"
    for one in found:
        lines += ["", one.rule if one.since is None else f"{one.rule}, since step {one.since}"]
        lines += [*_wrapped("seen", one.seen + "."), *_wrapped("try", one.advice)]
    quiet = [name for name in rule_names() if name not in {one.rule for one in found}]
    if not found:
        lines += ["", f"none of {len(quiet)} rules finds anything that keeps it from learning"]
    if every:
        lines += ["", "without a finding:", *_wrapped("", ", ".join(quiet))]
    return lines


def explanation_json(run: RunDir, record: Record, found: Sequence[Finding]) -> dict[str, Any]:
    return {
        "run": str(run.root),
        "step": len(record.lines),
        "findings": [{"rule": one.rule, "since": one.since, "seen": one.seen, "try": one.advice} for one in found],
        "rules": rule_names(),
    }


def rule_names() -> list[str]:
    """Return the names of all rules."""
    return [*(rule.name for rule in WARNING_RULES), *(rule.name for rule in RULES)]


def _wrapped(label: str, text: str) -> list[str]:
    first = f"  {label:<5} " if label else "  "
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=" " * len(first), break_on_hyphens=False)
