"""The record on disk as rows, one a step, for whoever shows it elsewhere while it grows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from megatron_rl.contract.attempt_records import MetricsLine, TimelineLine
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.records import Unreadable, decode_lines, read_lines

Line = TypeVar("Line", MetricsLine, TimelineLine)


class RecordRow(NamedTuple):
    step: int
    at: float | None
    """Unix time of the step, where it is known."""
    values: dict[str, float]


class Tail(Generic[Line]):
    """The lines of a JSON-lines file that grows, each once; without those that a full disk tore, which are written
    again."""

    def __init__(self, kind: type[Line], path: Path) -> None:
        self._kind: type[Line] = kind
        self._path = path
        self._read = 0

    def new(self) -> list[Line]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        return decode_lines(self._kind, whole).records


class RecordReader:
    """Rows of the record, one a step, each once and in order."""

    def __init__(self, run: RunDir, attempt: Attempt) -> None:
        self._steps = Tail(MetricsLine, run.metrics)
        self._evaluations = Tail(MetricsLine, run.evaluations)
        self._timeline = Tail(TimelineLine, attempt.timeline)
        self._at: dict[int, float] = {}
        for number in range(1, attempt.number):
            lines = read_lines(TimelineLine, run.attempt(number).timeline)
            if not isinstance(lines, Unreadable):  # its steps are shown without their time
                self._at |= times(lines.records)
        self._rows: dict[int, dict[str, float]] = {}
        self._newest = -1

    def rows(self, *, complete: bool) -> list[RecordRow]:
        """What is new. Unless the record is complete the last step is held back: its evaluation may be to come, in
        the next attempt perhaps."""
        # In this order: the evaluation of a step is written before the step that follows.
        steps, evaluations = self._steps.new(), self._evaluations.new()
        for line in [*steps, *evaluations]:
            self._rows.setdefault(line.step, {}).update(numbers(line.values))
        self._newest = max([self._newest, *(line.step for line in steps)])
        self._at |= times(self._timeline.new())
        ready = sorted(step for step in self._rows if complete or step < self._newest)
        return [RecordRow(step, self._at.get(step), self._rows.pop(step)) for step in ready]


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """What of a line can be drawn, under the names of metrics/names.py."""
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def times(lines: Iterable[TimelineLine]) -> dict[int, float]:
    """{step: when it was done}; the line after a load is about the step that was gone on from."""
    return {line.step: line.at for line in lines if line.resumed is None}
