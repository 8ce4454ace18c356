"""Record of a run's steps, read from its directory as it grows, and values derived from it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.host.record.evidence import read_replicas
from launcher.runs.step_record import TORN
from megatron_rl.contract.attempt_records import MetricsLine, Progress, ReplicaAddress, ReplicaState
from megatron_rl.contract.codes import REPLICA_RUNNING
from megatron_rl.contract.learning import Hindrance, numbers
from megatron_rl.contract.metrics_index import KEPT, WatchedRecord
from megatron_rl.contract.paths import FOLDERS, Attempt, Replica, RunDir
from megatron_rl.contract.records import ABSENT, RecordTail, if_readable, read

ANSWERS, STARTS = "answers", "starts"  # states of replicas
REPLICAS_EVERY_S = 1.0  # seconds between two looks at the replicas
RECENT = KEPT  # steps averaged for means and the time left


@dataclass(slots=True)
class History:
    steps: int
    phase: str = "starting"
    lines: list[MetricsLine] = field(default_factory=list)
    """The newest RECENT ones."""
    rewards: Sequence[float] = ()
    """Mean rewards of all steps that have one."""
    save_s: float | None = None
    """Seconds of the newest save."""
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
        times = numbers(self.lines, "time/step_s")
        return (self.steps - self.step) * sum(times) / len(times) if times else None

    def leaving_s(self) -> float | None:
        """Estimated seconds to finish the current step and save, from the last ones; None if nothing was saved yet."""
        steps = numbers(self.lines, "time/step_s")
        return self.save_s + max(steps) if self.save_s is not None and steps else None


class HistoryReader:
    def __init__(self, run: RunDir, attempt: Attempt, steps: int) -> None:
        self.attempt = attempt
        self._run = run
        self.history = History(steps)
        self._record = WatchedRecord(run)
        self._evaluations = RecordTail(MetricsLine, run.evaluations)
        self._evaluations_replaced = 0
        self._looked_at = float("-inf")  # time.monotonic() of the last look at the replicas

    def poll(self) -> History:
        """Return the current history; parts that cannot be read stay as they were."""
        problems = [self._poll_steps(), self._poll_evaluations()]
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

    def _poll_steps(self) -> str | None:
        try:
            self._record.new()
        except OSError as error:
            return f"{self._run.metrics}: {error.strerror}"
        found = self._record.summary
        self.history.lines = [*found.lines]
        self.history.rewards = found.watch.recent.rewards
        self.history.warnings = found.watch.warnings
        self.history.save_s = found.save_s
        return _damage(self._run.metrics, self._record.tail)

    def _poll_evaluations(self) -> str | None:
        try:
            found = self._evaluations.new()
        except OSError as error:
            return f"{self._run.evaluations}: {error.strerror}"
        if self._evaluations.replaced != self._evaluations_replaced:
            self._evaluations_replaced = self._evaluations.replaced
            self.history.evaluations.clear()
        self.history.evaluations += found
        return _damage(self._run.evaluations, self._evaluations)


def _damage(path: Path, tail: RecordTail[MetricsLine]) -> str | None:
    if b"\0" in tail.rest:  # left by a file system after a power failure; no line begins like this
        return f"{path}: {TORN}"
    return f"{path}: {tail.damaged} lines cannot be read" if tail.damaged else None


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
