"""Everything that the page of a run shows, as typed data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from launcher.explain.explanation import Explanation
from launcher.report.charts import Chart, Group
from launcher.report.lesson import ShownLesson
from launcher.report.recipe import Difference
from launcher.report.rollouts import Rollouts
from launcher.report.usage import AttemptRow, Timeline
from launcher.runs.slow_ranks import PhaseRank
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.learning import WINDOW, number, numbers
from megatron_rl.contract.run_records import Fork, RecipeChange, RightAnswer


class Span(NamedTuple):
    """A number at the start of a run and now, each the mean of at most WINDOW steps."""

    first: float
    last: float


class Cost(NamedTuple):
    amount: float
    currency: str


class ResultRow(NamedTuple):
    weights: str
    set: str
    score: str
    value: float
    standard_error: float | None
    problems: int


class Fact(NamedTuple):
    label: str
    text: str


@dataclass(frozen=True, slots=True)
class RunReport:
    name: str
    path: str
    recipe: str
    cluster: str
    state: str
    reason: str
    step: int
    steps: int
    """Steps of the recipe; 0 if unknown."""
    began: float | None
    """Unix time of the first attempt."""
    ended: float | None
    device: str
    """GPU or process."""
    gpus: int
    gpu_seconds: float
    goodput: float | None
    cost: Cost | None
    tokens: float
    """Generated tokens of the recorded steps."""
    reward: Span | None
    right: Span | None
    accuracies: dict[str, Span]
    eta_s: float | None
    explanation: Explanation
    groups: list[Group]
    lesson: ShownLesson | None
    """None if no step was recorded with tokens."""
    right_answers: Sequence[RightAnswer]
    rollouts: Rollouts
    evaluations: list[Chart]
    results: list[ResultRow]
    timeline: Timeline | None
    attempts: list[AttemptRow]
    phases: list[PhaseRank]
    base: str
    differences: list[Difference]
    changes: list[RecipeChange]
    fork: Fork | None
    values: dict[str, Any]
    """Sections of resolved.yaml, with defaults."""
    facts: list[Fact]
    unread: list[str] = field(default_factory=list)


def span(lines: Sequence[MetricsLine], name: str) -> Span | None:
    values = numbers(lines, name)
    if not values:
        return None
    first, last = values[:WINDOW], values[-WINDOW:]
    return Span(sum(first) / len(first), sum(last) / len(last))


def generated_tokens(lines: Sequence[MetricsLine]) -> float:
    return sum((number(line, "answers") or 0) * (number(line, "answer_length") or 0) for line in lines)
