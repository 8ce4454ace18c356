"""Everything that the page of a run shows, as typed data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from launcher.explain.explanation import Explanation
from launcher.report.charts import Chart, Group
from launcher.report.page_rollouts import Rollouts
from launcher.report.shown_lesson import ShownLesson
from launcher.runs.state import RunStatus
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.learning import WINDOW, number, numbers
from megatron_rl.contract.run_records import Fork, RecipeChange, RightAnswer


class FirstAndLast(NamedTuple):
    """A number at the start of a run and now, each the mean of at most WINDOW steps."""

    first: float
    last: float


class ResultRow(NamedTuple):
    weights: str
    set: str
    score: str
    value: float
    standard_error: float | None
    problems: int


class RunFact(NamedTuple):
    label: str
    text: str


class AttemptRow(NamedTuple):
    attempt: int
    start: float
    seconds: float
    queued_s: float
    gpus: int
    nodes: list[str]
    goodput: float | None
    lost: float | None
    outcome: str
    ending: str


@dataclass(frozen=True, slots=True)
class RunReport:
    status: RunStatus
    path: str
    recipe: str
    step: int
    began: float | None
    ended: float | None
    device: str
    gpus: int
    gpu_seconds: float
    goodput: float | None
    tokens: float
    reward: FirstAndLast | None
    right: FirstAndLast | None
    losses: dict[str, FirstAndLast]
    """Losses on held-out rows."""
    accuracies: dict[str, FirstAndLast]
    eta_s: float | None
    explanation: Explanation
    groups: list[Group]
    lesson: ShownLesson | None
    """None if no step was recorded with tokens."""
    right_answers: Sequence[RightAnswer]
    rollouts: Rollouts
    unread_parts: int
    """Hundreds of steps whose groups were not read."""
    evaluations: list[Chart]
    results: list[ResultRow]
    shares: dict[str, float]
    attempts: list[AttemptRow]
    written: str
    changes: list[RecipeChange]
    fork: Fork | None
    values: dict[str, Any]
    facts: list[RunFact]
    unread: list[str] = field(default_factory=list)


def span(lines: Sequence[MetricsLine], name: str) -> FirstAndLast | None:
    values = numbers(lines, name)
    if not values:
        return None
    first, last = values[:WINDOW], values[-WINDOW:]
    return FirstAndLast(sum(first) / len(first), sum(last) / len(last))


def generated_tokens(lines: Sequence[MetricsLine]) -> float:
    return sum((number(line, "answers") or 0) * (number(line, "answer_length") or 0) for line in lines)
