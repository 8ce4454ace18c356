"""Everything that the rules read of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher.explain.formats import NO_FORMATS, Formats
from launcher.explain.group_facts import NO_FACTS, GroupFacts
from launcher.runs.slow_ranks import SlowRank
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.learning import WINDOW, LearningWarning, number
from megatron_rl.contract.lesson_records import LessonRecord


@dataclass(frozen=True, slots=True)
class Record:
    """Recipe and record of a run."""

    recipe: Mapping[str, Any]
    """Sections of resolved.yaml."""
    lines: Sequence[MetricsLine]
    """One per step."""
    evaluations: Sequence[MetricsLine] = ()
    warnings: Sequence[LearningWarning] = field(default_factory=list)
    """Warnings that hold after the newest step (contract/learning.py)."""
    slow_ranks: Sequence[SlowRank] = ()
    """Slow ranks of the newest attempt, the slowest first."""
    left_out: Sequence[str] = ()
    """Files with lines that are left out, and why."""
    formats: Formats = NO_FORMATS
    """Formats of the answers that are recorded with their tokens, of the newest steps."""
    facts: GroupFacts = NO_FACTS
    """Facts about the lesson in the recorded groups of the newest steps."""
    lesson: LessonRecord | None = None
    """Counts and right answers from the start; None in runs of an older mrl."""

    def key(self, name: str) -> Any:
        """Return the value of a recipe key, such as `grpo.policy_loss`; None if it, or its section, is null."""
        value: Any = self.recipe
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def first(self, name: str) -> float | None:
        """Return the mean of a metric over the first steps; None unless each of at least WINDOW steps has it."""
        return _mean(self.lines[:WINDOW], name)

    def last(self, name: str) -> float | None:
        """Return the same over the newest steps."""
        return _mean(self.lines[-WINDOW:], name)

    def series(self, name: str) -> list[float]:
        """Return the values of a metric in all steps that have it."""
        return [value for line in self.lines if (value := number(line, name)) is not None]


def _mean(lines: Sequence[MetricsLine], name: str) -> float | None:
    values = [value for line in lines if (value := number(line, name)) is not None]
    return sum(values) / WINDOW if len(values) == WINDOW else None
