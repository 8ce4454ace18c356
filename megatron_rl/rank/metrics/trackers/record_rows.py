"""Rows of the record for trackers: the numbers of a step and of its evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from megatron_rl.contract.attempt_records import MetricsLine, TimelineLine
from megatron_rl.contract.metrics_index import look_up
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.records import RecordTail, Unreadable, read_lines


class RecordRow(NamedTuple):
    step: int
    at: float | None  # Unix time of the step; None if unknown
    values: dict[str, float]
    late: bool = False
    """Whether this step or a later one was shown before: the row is an evaluation that went on beside training."""


class RecordReader:
    """Rows of the record by step, each once."""

    def __init__(self, run: RunDir, attempt: Attempt, first: int = 0, evaluated: int | None = None) -> None:
        """
        first: first step whose row is wanted.
        evaluated: step of the newest evaluation that is known already; None: those before `first` are. One that went
            on beside training may be recorded after later steps, and by a later attempt. They are recorded in order.
        """
        self._first, self._evaluated = first, first - 1 if evaluated is None else evaluated
        self._steps = RecordTail(MetricsLine, run.metrics, begin=lambda: look_up(run, first - 1).place)
        self._evaluations = RecordTail(MetricsLine, run.evaluations)
        self._timeline = RecordTail(TimelineLine, attempt.timeline)
        self._at: dict[int, float] = {}
        for number in (earlier for earlier in run.attempt_numbers() if earlier < attempt.number):
            lines = read_lines(TimelineLine, run.attempt(number).timeline)
            if not isinstance(lines, Unreadable):  # its steps are then shown without their time
                self._at |= times(lines.records)
        self._rows: dict[int, dict[str, float]] = {}
        self._newest, self._given = -1, first - 1

    def rows(self, *, complete: bool) -> list[RecordRow]:
        """New rows. Holds the last step back unless the record is complete: its evaluation may still follow, perhaps in
        the next attempt."""
        # In this order: the evaluation of a step is written before the step that follows, unless it goes on beside
        # training.
        steps, evaluations = self._steps.new(), self._evaluations.new()
        lacking = [line for line in steps if line.step >= self._first]
        lacking += [line for line in evaluations if line.step >= self._first or line.step > self._evaluated]
        for line in lacking:
            self._rows.setdefault(line.step, {}).update(numbers(line.values))
        self._newest = max([self._newest, *(line.step for line in steps)])
        self._at |= times(self._timeline.new())
        ready = sorted(step for step in self._rows if complete or step < self._newest)
        given, self._given = self._given, max([self._given, *ready])
        return [RecordRow(step, self._at.get(step), self._rows.pop(step), step <= given) for step in ready]


def newest_evaluation(rows: Iterable[RecordRow]) -> int | None:
    """Return the step of the newest evaluation in some rows; None without one."""
    return max((row.step for row in rows if any(name.startswith("eval/") for name in row.values)), default=None)


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def times(lines: Iterable[TimelineLine]) -> dict[int, float]:
    """{step: unix time of its end}. Omits lines of a load, which repeat the step that was resumed from."""
    return {line.step: line.at for line in lines if line.resumed is None}
