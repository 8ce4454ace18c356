"""Record of a run's steps, read from its directory as it grows, and values derived from it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.host.record.evidence import read_replicas
from megatron_rl.contract.attempt_records import MetricsLine, Progress, ReplicaAddress, ReplicaState
from megatron_rl.contract.codes import REPLICA_RUNNING
from megatron_rl.contract.learning import Hindrance, numbers
from megatron_rl.contract.paths import FOLDERS, Attempt, Replica, RunDir
from megatron_rl.contract.records import ABSENT, Absent, Unreadable, decode_lines, if_readable, read
from megatron_rl.contract.window_rules import Watch

ANSWERS, STARTS = "answers", "starts"  # states of replicas
LONGEST_LINE = 65536  # bytes
TORN = "the last line cannot be read"
REPLICAS_EVERY_S = 1.0  # seconds between two looks at the replicas
RECENT = 20  # steps averaged for means and the time left


@dataclass(slots=True)
class History:
    steps: int
    phase: str = "starting"
    lines: list[MetricsLine] = field(default_factory=list)
    evaluations: list[MetricsLine] = field(default_factory=list)
    warnings: list[Hindrance] = field(default_factory=list)
    waits_for: list[dict[str, Any]] = field(default_factory=list)
    """Replicas that the run waits for, and those that have ended, as `replicas_json` returns them."""
    unread: list[str] = field(default_factory=list)

    @property
    def step(self) -> int:
        """Newest recorded step; 0 before the first."""
        return self.lines[-1].step if self.lines else 0

    def eta_s(self) -> float | None:
        times = numbers(self.lines[-RECENT:], "time/step_s")
        return (self.steps - self.step) * sum(times) / len(times) if times else None

    def leaving_s(self) -> float | None:
        """Estimated seconds to finish the current step and save, from the last ones; None if nothing was saved yet."""
        saves, steps = numbers(self.lines, "time/save_s"), numbers(self.lines[-RECENT:], "time/step_s")
        return saves[-1] + max(steps) if saves and steps else None

    def rewards(self) -> list[float]:
        return numbers(self.lines, "mean_reward")


class HistoryReader:
    def __init__(self, run: RunDir, attempt: Attempt, steps: int) -> None:
        self.attempt = attempt
        self.history = History(steps)
        self._metrics = _GrowingFile(run.metrics, self.history.lines)
        self._evaluations = _GrowingFile(run.evaluations, self.history.evaluations)
        self._watch, self._watched, self._replaced = Watch(), 0, 0
        self._looked_at = float("-inf")  # time.monotonic() of the last look at the replicas

    def poll(self) -> History:
        """Return the current history; parts that cannot be read stay as they were."""
        problems = [self._metrics.poll(), self._evaluations.poll()]
        self._update_warnings()
        progress = read(Progress, self.attempt.progress)
        if isinstance(progress, Progress):
            self.history.phase = progress.phase
        elif progress is not ABSENT:
            problems.append(str(progress))
        if time.monotonic() > self._looked_at + REPLICAS_EVERY_S:  # a run may have hundreds of them
            self.history.waits_for = waited_for(replicas_json(self.attempt))
            self._looked_at = time.monotonic()
        self.history.unread = [problem for problem in problems if problem]
        return self.history

    def _update_warnings(self) -> None:
        if self._metrics.replaced != self._replaced:  # resuming has removed some of the lines
            self._watch, self._watched, self._replaced = Watch(), 0, self._metrics.replaced
        for line in self.history.lines[self._watched :]:
            self._watch.add(line)
        self._watched = len(self.history.lines)
        self.history.warnings = self._watch.warnings


class _GrowingFile:
    """Reader that keeps `lines` equal to the complete lines of a JSON-lines file that grows, and is replaced on
    resume."""

    def __init__(self, path: Path, lines: list[MetricsLine]) -> None:
        self._path = path
        self._lines = lines
        self._identity: tuple[int, int] | None = None
        self._offset = self._damaged = 0
        self.replaced = 0

    def poll(self) -> str | None:
        # A run appends lines while this reads, so only whole lines count, and the rest is read again next time. On
        # resume the run replaces the file by a shorter one without the steps that it repeats: another inode, or less
        # data than was read, means that all lines are read again. A file that is replaced just after it was opened is
        # read as it was, and the next poll sees the new inode.
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if (status.st_dev, status.st_ino) != self._identity or status.st_size < self._offset:
                    self._identity, self._offset, self._damaged = (status.st_dev, status.st_ino), 0, 0
                    self._lines.clear()
                    self.replaced += 1
                file.seek(self._offset)
                data = file.read()
        except (FileNotFoundError, NotADirectoryError):  # not written yet
            return None
        except OSError as error:
            return f"{self._path}: {error.strerror}"
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        found = decode_lines(MetricsLine, whole)
        self._lines.extend(found.records)
        self._damaged += len(found.damaged)
        if b"\0" in data[len(whole) :]:  # left by a file system after a power failure; no line begins like this
            return f"{self._path}: {TORN}"
        return f"{self._path}: {self._damaged} lines cannot be read" if self._damaged else None


def newest_line(path: Path) -> MetricsLine | Absent | Unreadable:
    """Return the last complete and readable line of metrics.jsonl, reading only the end of the file."""
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
    return Unreadable(str(path), "no line can be read") if lines else ABSENT


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def clock(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def shown_accuracy(value: float | None) -> str:
    return "unknown (no answer has a reward)" if value is None else f"{value:.3f}"


def replicas_json(attempt: Attempt) -> list[dict[str, Any]]:
    """Return the state of each replica: `state` is answers, starts, waiting, finished or given up; `at` since when
    (unix time); `phase` what a start does; `why` how it ended last."""
    return [
        _replica_json(state, attempt.replica(state.replica, kind))
        for kind in FOLDERS
        for state in read_replicas(attempt, kind)
    ]


def waited_for(replicas: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Pick from `replicas_json` those that the run waits for, because none of their kind answers, and ended ones."""
    served = {one["kind"] for one in replicas if one["state"] == ANSWERS}
    return [one for one in replicas if one["kind"] not in served or one["state"] not in (ANSWERS, STARTS)]


def _replica_json(state: ReplicaState, files: Replica) -> dict[str, Any]:
    address, progress = None, None
    if state.state == REPLICA_RUNNING:
        address = if_readable(read(ReplicaAddress, files.listener))
        progress = if_readable(read(Progress, files.progress))
    there = address is not None and address.start + 1 >= state.starts
    return {
        "name": files.role,
        "kind": files.kind,
        "state": (ANSWERS if there else STARTS) if state.state == REPLICA_RUNNING else state.state,
        "phase": None if there or progress is None else progress.phase,
        "at": address.at if address is not None and there else state.at or None,
        "address": f"{address.host}:{address.port}" if address is not None and there else None,
        "hosts": list(state.hosts),
        "starts": state.starts,
        "why": state.why,
    }
