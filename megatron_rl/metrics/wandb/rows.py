"""The record on disk as rows, one a step, for whoever shows it elsewhere while it grows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.run_dir import read_json_lines


class Row(NamedTuple):
    step: int
    at: float | None
    """Unix time of the step, where it is known."""
    values: dict[str, float]


class Tail:
    """The lines of a JSON-lines file that grows, each once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def new(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        found = []
        for line in whole.splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:  # torn by a full disk, and written again
                continue
        return found


class Record:
    """Rows of the record, one a step, each once and in order."""

    def __init__(self, run: RunDir, attempt: Attempt) -> None:
        self._steps, self._evaluations, self._timeline = map(Tail, (run.metrics, run.evaluations, attempt.timeline))
        earlier = (run.attempt(number).timeline for number in range(1, attempt.number))
        self._at = times(line for path in earlier for line in read_json_lines(path))
        self._rows: dict[int, dict[str, float]] = {}
        self._newest = -1

    def rows(self, *, complete: bool) -> list[Row]:
        """What is new. Unless the record is complete the last step is held back: its evaluation may be to come, in
        the next attempt perhaps."""
        # In this order: the evaluation of a step is written before the step that follows.
        steps, evaluations = self._steps.new(), self._evaluations.new()
        for line in [*steps, *evaluations]:
            self._rows.setdefault(line["step"], {}).update(numbers(line))
        self._newest = max([self._newest, *(line["step"] for line in steps)])
        self._at |= times(self._timeline.new())
        ready = sorted(step for step in self._rows if complete or step < self._newest)
        return [Row(step, self._at.get(step), self._rows.pop(step)) for step in ready]


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """What of a line can be drawn, under the names of metrics/names.py."""
    return {name: value for name, value in line.items() if name != "step" and isinstance(value, int | float)}


def times(lines: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """{step: when it was done}, of Attempt.timeline; a line `resumed` is about the step that was gone on from."""
    return {line["step"]: line["at"] for line in lines if "resumed" not in line}
