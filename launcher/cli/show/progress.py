"""What a run has done so far, read from its directory as it grows."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.run_dir import read_json

BARS = "▁▂▃▄▅▆▇█"
LONGEST_ROW = 65536  # bytes
RECENT = 20  # steps behind a mean and the time left

Row = dict[str, Any]


@dataclass(slots=True)
class Status:
    """The record of a run, and what rank 0 is doing."""

    steps: int
    phase: str = "starting"
    rows: list[Row] = field(default_factory=list)
    """metrics.jsonl: one row per step."""
    evaluations: list[Row] = field(default_factory=list)
    """evaluations.jsonl: one row per evaluation."""

    @property
    def step(self) -> int:
        return int(self.rows[-1]["step"]) if self.rows else 0

    def eta_s(self) -> float | None:
        """Seconds to the last step at the pace of the recent ones."""
        times = [row["time/step_s"] for row in self.rows[-RECENT:] if "time/step_s" in row]
        return (self.steps - self.step) * sum(times) / len(times) if times else None

    def rewards(self) -> list[float]:
        return [row["mean_reward"] for row in self.rows if "mean_reward" in row]

    def accuracies(self) -> dict[str, tuple[float, float]]:
        """Evaluation set -> greedy accuracy in the first and the last evaluation."""
        found: dict[str, tuple[float, float]] = {}
        for row in self.evaluations:
            for name, value in accuracies(row).items():
                found[name] = (found[name][0] if name in found else value, value)
        return found


class Reader:
    """Follows the files of a run without reading them again from the start."""

    def __init__(self, run: RunDir, attempt: Attempt, steps: int) -> None:
        self.attempt = attempt
        self.status = Status(steps)
        self._progress = attempt.progress
        self._tails = (_Tail(run.metrics, self.status.rows), _Tail(run.evaluations, self.status.evaluations))

    def poll(self) -> Status:
        for tail in self._tails:
            tail.poll()
        progress = read_json(self._progress)
        if progress is not None:
            self.status.phase = progress["phase"]
        return self.status


class _Tail:
    """Keeps `rows` equal to the whole lines of a JSON-lines file that grows, and is replaced at a resume."""

    def __init__(self, path: Path, rows: list[Row]) -> None:
        self._path = path
        self._rows = rows
        self._file: tuple[int, int] | None = None
        self._offset = 0

    def poll(self) -> None:
        try:
            with self._path.open("rb") as file:
                status = self._path.stat()
                if (status.st_dev, status.st_ino) != self._file or status.st_size < self._offset:
                    self._file, self._offset = (status.st_dev, status.st_ino), 0
                    self._rows.clear()
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        self._rows.extend(json.loads(line) for line in whole.splitlines() if line)


def last_row(path: Path) -> Row | None:
    """The last whole line of a JSON-lines file, without reading the rest."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LONGEST_ROW))
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return None
    return dict(json.loads(lines[-1])) if lines and lines[-1].startswith(b"{") else None


def accuracies(row: Row) -> dict[str, float]:
    """{evaluation set: greedy accuracy} of one evaluation."""
    parts = ((key.split("/"), value) for key, value in row.items())
    return {name[1]: value for name, value in parts if name[0] == "eval" and name[-1] == "greedy_accuracy"}


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Means of `width` equal parts of the values, as bars between the smallest and the largest."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [round(part * len(values) / width) for part in range(width + 1)]
    means = [mean(values[low:high]) for low, high in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    return "".join(
        BARS[min(int((value - low) / span * len(BARS)), len(BARS) - 1)] if span else BARS[0] for value in means
    )


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def clock(seconds: float) -> str:
    """`1:05`, `2:03:09`."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
