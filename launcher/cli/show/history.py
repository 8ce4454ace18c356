"""The record of a run's steps, read from its directory as it grows, and what is derived from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from megatron_rl.contract.attempt_records import MetricsLine, Progress
from megatron_rl.contract.learning import LearningWarning, Watch, number
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.records import ABSENT, Absent, Unreadable, decode_lines, read

BARS = "▁▂▃▄▅▆▇█"
LONGEST_LINE = 65536  # bytes
TORN = "its last line cannot be read"
RECENT = 20  # steps behind a mean and the time left


@dataclass(slots=True)
class History:
    """The steps and evaluations of a run, and what rank 0 is doing."""

    steps: int
    """That the run is to make."""
    phase: str = "starting"
    lines: list[MetricsLine] = field(default_factory=list)
    """metrics.jsonl: one a step."""
    evaluations: list[MetricsLine] = field(default_factory=list)
    """evaluations.jsonl: one an evaluation."""
    warnings: list[LearningWarning] = field(default_factory=list)
    """Signs in the lines that nothing is learned or something is lost."""
    unread: list[str] = field(default_factory=list)
    """What could not be read of it at the last look, and why."""

    @property
    def step(self) -> int:
        """The newest step on record; 0 before the first."""
        return self.lines[-1].step if self.lines else 0

    def eta_s(self) -> float | None:
        """Seconds to the last step at the pace of the recent ones."""
        times = numbers(self.lines[-RECENT:], "time/step_s")
        return (self.steps - self.step) * sum(times) / len(times) if times else None

    def leaving_s(self) -> float | None:
        """Seconds that a save and the end of the step before it may take, by the last ones; None without any."""
        saves, steps = numbers(self.lines, "time/save_s"), numbers(self.lines[-RECENT:], "time/step_s")
        return saves[-1] + max(steps) if saves and steps else None

    def rewards(self) -> list[float]:
        """The mean reward of each step that has one."""
        return numbers(self.lines, "mean_reward")

    def accuracies(self) -> dict[str, tuple[float, float]]:
        """Evaluation set -> greedy accuracy in the first and the last evaluation."""
        found: dict[str, tuple[float, float]] = {}
        for line in self.evaluations:
            for name, value in evaluation_values(line, "greedy_accuracy").items():
                found[name] = (found[name][0] if name in found else value, value)
        return found


class HistoryReader:
    """Follows the files of a run without reading them again from the start."""

    def __init__(self, run: RunDir, attempt: Attempt, steps: int) -> None:
        self.attempt = attempt
        self.history = History(steps)
        self._metrics = _GrowingFile(run.metrics, self.history.lines)
        self._evaluations = _GrowingFile(run.evaluations, self.history.evaluations)
        self._watch, self._watched, self._replaced = Watch(), 0, 0

    def poll(self) -> History:
        """The history as it is now; of what cannot be read, as it was."""
        problems = [self._metrics.poll(), self._evaluations.poll()]
        self._update_warnings()
        progress = read(Progress, self.attempt.progress)
        if isinstance(progress, Progress):
            self.history.phase = progress.phase
        elif progress is not ABSENT:
            problems.append(str(progress))
        self.history.unread = [problem for problem in problems if problem]
        return self.history

    def _update_warnings(self) -> None:
        """Bring the warnings up to date with the lines."""
        if self._metrics.replaced != self._replaced:  # a resume took some of the lines back
            self._watch, self._watched, self._replaced = Watch(), 0, self._metrics.replaced
        for line in self.history.lines[self._watched :]:
            self._watch.add(line)
        self._watched = len(self.history.lines)
        self.history.warnings = self._watch.warnings


class _GrowingFile:
    """Keeps `lines` equal to the whole lines of a JSON-lines file that grows, and is replaced at a resume."""

    def __init__(self, path: Path, lines: list[MetricsLine]) -> None:
        self._path = path
        self._lines = lines
        self._identity: tuple[int, int] | None = None
        self._offset = self._damaged = 0
        self.replaced = 0
        """How often the lines were read from the start."""

    def poll(self) -> str | None:
        """Read what is new; what could not be read, and why."""
        try:
            with self._path.open("rb") as file:
                status = self._path.stat()
                if (status.st_dev, status.st_ino) != self._identity or status.st_size < self._offset:
                    self._identity, self._offset, self._damaged = (status.st_dev, status.st_ino), 0, 0
                    self._lines.clear()
                    self.replaced += 1
                file.seek(self._offset)
                data = file.read()
        except (FileNotFoundError, NotADirectoryError):  # not there yet
            return None
        except OSError as error:
            return f"{self._path}: {error.strerror}"
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        found = decode_lines(MetricsLine, whole)
        self._lines.extend(found.records)
        self._damaged += len(found.damaged)
        if b"\0" in data[len(whole) :]:  # as a file system leaves it that lost its power, not as a line begins
            return f"{self._path}: {TORN}"
        return f"{self._path}: {self._damaged} of its lines cannot be read" if self._damaged else None


def newest_line(path: Path) -> MetricsLine | Absent | Unreadable:
    """The last whole line of metrics.jsonl that can be read, without reading the rest."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LONGEST_LINE))
            data = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return ABSENT
    except OSError as error:
        return Unreadable(str(path), str(error.strerror))
    if b"\0" in data[data.rfind(b"\n") + 1 :]:
        return Unreadable(str(path), TORN)
    lines = [line for line in data[: data.rfind(b"\n") + 1].split(b"\n") if line]
    for line in reversed(lines):
        if found := decode_lines(MetricsLine, line).records:
            return found[-1]
    return Unreadable(str(path), "no line of it can be read") if lines else ABSENT


def numbers(lines: Sequence[MetricsLine], name: str) -> list[float]:
    """The values of those steps that have one."""
    return [value for line in lines if (value := number(line, name)) is not None]


def evaluation_values(line: MetricsLine, metric: str) -> dict[str, float]:
    """{evaluation set: value} of a metric, such as greedy_accuracy, in one evaluation."""
    parts = ((name.split("/"), number(line, name)) for name in line.values)
    return {
        "/".join(part[1:-1]): value
        for part, value in parts
        if value is not None and len(part) > 2 and part[0] == "eval" and part[-1] == metric
    }


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
    """The arithmetic mean of at least one value."""
    return math.fsum(values) / len(values)


def clock(seconds: float) -> str:
    """`1:05`, `2:03:09`."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
