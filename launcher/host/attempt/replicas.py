"""The replicas of an attempt, which generate, or hold the teacher or the reward model: started beside its training, and
again when one ends or falls silent.

What starts the ranks of a replica depends on where the attempt runs (slurm_steps, local_ranks); whether and when it
starts again is one policy (judge.replica_restarts). A lost replica never ends the training from here: only the ranks
that train know whether they can continue without it.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Sequence
from typing import Callable

from launcher.host.attempt.interfaces import ReplicaRanks
from launcher.host.judge.hang import describe_hang
from launcher.host.judge.replica_restarts import RESTARTS, after_end, describe
from launcher.host.judge.verdict import Verdict, verdict_of
from launcher.host.record.evidence import Observed, read_evidence
from launcher.host.record.heartbeats import HangWatch
from launcher.host.slurm.call import SlurmRefused
from megatron_rl.contract.attempt_records import Hang, ReplicaState
from megatron_rl.contract.codes import (
    FINISHED,
    MISCONFIGURED,
    REPLICA_FINISHED,
    REPLICA_GIVEN_UP,
    REPLICA_RUNNING,
    REPLICA_WAITING,
    STACKS_LIMIT_S,
    STACKS_SIGNAL,
)
from megatron_rl.contract.paths import Replica
from megatron_rl.contract.records import write

Start = Callable[[Replica, int], ReplicaRanks]
"""(files of a replica, number of its earlier starts) -> its started ranks. Raises OSError."""


class Replicas:
    """Replicas of an attempt, which start at the first `poll`."""

    def __init__(self, files: Sequence[Replica], start: Start, silence_limit: float) -> None:
        self._all = [_Replica(each, start, silence_limit) for each in files]

    def poll(self, now: float) -> None:
        """Start replicas that do not run, end those that hang. Raises the first OSError or SlurmRefused, after all.

        now: time.monotonic().
        """
        errors: list[Exception] = []
        for replica in self._all:
            try:
                replica.poll(now)
            except (OSError, SlurmRefused) as error:
                errors.append(error)
        if errors:
            raise errors[0]

    @property
    def ranks(self) -> list[ReplicaRanks]:
        return [replica.ranks for replica in self._all if replica.ranks is not None]


class _Replica:
    def __init__(self, files: Replica, start: Start, silence_limit: float) -> None:
        self._files, self._start, self._silence_limit = files, start, silence_limit
        self.ranks: ReplicaRanks | None = None
        self._starts = self._used = 0
        self._due: float | None = 0.0  # when it starts next; None: it runs, or is given up
        self._began = 0.0
        self._watch = HangWatch(files, silence_limit)
        self._hang: Hang | None = None
        self._kill_at = 0.0
        self._state = ReplicaState(files.number, REPLICA_WAITING, 0, 0.0)
        self._unwritten = False

    def poll(self, now: float) -> None:
        if self.ranks is None and self._due is not None and now >= self._due:
            self._start_ranks(now)
        if self.ranks is not None:
            self._check_hang(self.ranks, now)
            observed = self.ranks.observed(now)
            if observed is not None:
                self._conclude(self.ranks, observed, now)
        if self._unwritten:
            write(self._files.state, self._state)
            self._unwritten = False

    def _start_ranks(self, now: float) -> None:
        forget_start(self._files)
        self.ranks = self._start(self._files, self._starts)
        self._starts += 1
        self._due, self._began = None, now
        self._hang, self._watch = None, HangWatch(self._files, self._silence_limit)
        self._set_state(REPLICA_RUNNING)

    def _check_hang(self, ranks: ReplicaRanks, now: float) -> None:
        if self._hang is None:
            self._hang = self._watch.poll(now)
            if self._hang is not None:
                print(f"{self._files.role} {describe_hang(self._hang)}")
                self._kill_at = now + STACKS_LIMIT_S
                ranks.signal(STACKS_SIGNAL)
        elif now >= self._kill_at:
            ranks.end(now, hurried=True)

    def _conclude(self, ranks: ReplicaRanks, observed: Observed, now: float) -> None:
        observed = observed._replace(hang=self._hang, heartbeats=self._watch.newest)
        verdict = verdict_of(read_evidence(self._files, observed, None))
        ranks.close()
        self.ranks = None
        if verdict.outcome == FINISHED:
            self._set_state(REPLICA_FINISHED)
            return
        restart = after_end(self._used, now - self._began, verdict)
        self._used = restart.used
        why = describe(self._files.role, verdict)
        if restart.pause_s is None:
            print(f"{why}; it is given up")
            self._set_state(REPLICA_GIVEN_UP, why, verdict)
            return
        self._due = now + restart.pause_s
        print(f"{why}; it starts again in {restart.pause_s:.0f} s, restart {restart.used} of at most {RESTARTS}")
        self._set_state(REPLICA_WAITING, why, verdict)

    def _set_state(self, state: str, why: str | None = None, verdict: Verdict | None = None) -> None:
        self._state = ReplicaState(
            replica=self._files.number,
            state=state,
            starts=self._starts,
            at=time.time(),
            hosts=list(self.ranks.hosts) if self.ranks is not None else [],
            why=why or self._state.why,
            misconfigured=verdict is not None and verdict.outcome == MISCONFIGURED,
        )
        self._unwritten = True


def forget_start(files: Replica) -> None:
    """Create the folder of a replica, and remove the files of an earlier start from it. Raises OSError."""
    files.folder.mkdir(parents=True, exist_ok=True)
    for path in [files.listener, files.progress, files.outcome, files.hang, files.srun, *files.errors()]:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    for folder in (files.heartbeats, files.address("any").parent):
        shutil.rmtree(folder, ignore_errors=True)
