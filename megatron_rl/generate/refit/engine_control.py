"""Commands of the first training rank to the engines on the training ranks' devices, and which of them occupy these."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable
from concurrent.futures import Future, wait
from typing import Any

from megatron_rl.contract.attempt_records import Hang, ReplicaState
from megatron_rl.contract.codes import REPLICA_GIVEN_UP, REPLICA_RUNNING
from megatron_rl.contract.paths import Attempt
from megatron_rl.contract.records import if_readable, read, write
from megatron_rl.generate.refit.epoch import ReplicaStart
from megatron_rl.generate.refit.replica_control import reached_states
from megatron_rl.generate.replicas.pool import ReplicaPool

logger = logging.getLogger("megatron_rl")

LOOK_S = 1.0
"""Seconds for which a record of the host side is not read again."""
REPEAT_S = 5.0
"""Seconds until a command that has failed is repeated."""
LEAVE_S = 120.0
"""Seconds in which an engine must leave the devices."""


class EngineControl:
    """An engine occupies the devices from its start until it has gone to sleep, or its replica has ended. That a
    replica cannot be reached says nothing about the memory that its engine has."""

    def __init__(self, pool: ReplicaPool, attempt: Attempt) -> None:
        self._pool, self._attempt = pool, attempt
        self._starts, self._sleeps = _GivenOnce(pool, "start"), _GivenOnce(pool, "sleep", LEAVE_S)
        self._reported: set[ReplicaStart] = set()  # to the host side, to be ended
        self._records: dict[int, tuple[float, ReplicaState | None]] = {}  # of the host side, and when they were read

    def down(self) -> frozenset[ReplicaStart]:
        """Replicas whose engine is not started, or still starting."""
        return frozenset(started for started, state in self._pool.states().items() if state == "down")

    def any_runs(self) -> bool:
        return any(state != "down" for state in self._pool.states().values())

    def start(self) -> None:
        """Tell the replicas that are down to start their engines. Returns at once."""
        self._starts.give(self.down())

    def missing(self, replicas: int) -> list[str]:
        """Name, for people, what is not there of so many replicas and their engines, and may still come. Raises
        NoReplicaLeft."""
        states = reached_states(self._pool)
        there = {replica for replica, _ in states}
        absent = [f"replica {each}" for each in range(replicas) if each not in there and not self._given_up(each)]
        down = sorted(replica for (replica, _), state in states.items() if state == "down")
        return [*absent, *(f"the engine of replica {replica}" for replica in down)]

    def begin_sleep(self) -> None:
        """Tell all engines to leave the devices. Returns at once."""
        self._sleeps = _GivenOnce(self._pool, "sleep", LEAVE_S)
        self._sleeps.give(self._starts.given & self._pool.states().keys())

    def occupants(self, wait_s: float) -> list[ReplicaStart]:
        """Replicas whose engines have not left the devices since `begin_sleep`. Returns as soon as there are none, at
        the latest after `wait_s` seconds."""
        if self._starts.given - self._sleeps.obeyed:
            self._sleeps.wait(wait_s)
        left = self._starts.given - self._sleeps.obeyed
        if not left:
            return []
        reached = self._pool.states().keys()
        self._sleeps.give(left & reached)
        for gone in [started for started in left - reached if self._has_ended(started, reached)]:
            self._starts.forget(gone)
        return sorted(left & self._starts.given)

    def end(self, who: Collection[ReplicaStart], silent_s: float) -> None:
        """Have the host side end replicas and start them again. Each start of a replica is reported until that has
        succeeded once.

        silent_s: seconds for which their engines have been expected to leave.
        """
        for started in {*who} - self._reported:
            logger.warning("the engine of replica %d does not leave the devices of the ranks: it is ended", started[0])
            hang = Hang(0, None, "leaving the devices of the ranks", 0, round(silent_s, 1), time.time())
            try:
                write(self._attempt.replica(started[0]).hang, hang)
                self._reported.add(started)
            except OSError as error:
                logger.warning("replica %d cannot be ended: %s", started[0], error)

    def _given_up(self, replica: int) -> bool:
        record = self._record(replica)
        return record is not None and record.state == REPLICA_GIVEN_UP

    def _has_ended(self, started: ReplicaStart, reached: Collection[ReplicaStart]) -> bool:
        """Whether a start of a replica has ended, as its next start or the host side says."""
        replica, start = started
        if any(number == replica and later > start for number, later in reached):
            return True
        record = self._record(replica)
        if record is None or record.starts <= start:
            return False
        return record.starts > start + 1 or record.state != REPLICA_RUNNING

    def _record(self, replica: int) -> ReplicaState | None:
        now, found = time.monotonic(), self._records.get(replica)
        if found is None or now - found[0] > LOOK_S:
            found = self._records[replica] = now, if_readable(read(ReplicaState, self._attempt.replica(replica).state))
        return found[1]


class _GivenOnce:
    """A command without content that each replica gets once, and again if it has failed."""

    def __init__(self, pool: ReplicaPool, path: str, timeout_s: float = 0.0) -> None:
        self._pool, self._path, self._timeout_s = pool, path, timeout_s
        self._calls: dict[ReplicaStart, tuple[float, Future[dict[str, Any]]]] = {}  # and when they were made

    @property
    def given(self) -> frozenset[ReplicaStart]:
        """Replicas that may have got it."""
        return frozenset(self._calls)

    @property
    def obeyed(self) -> frozenset[ReplicaStart]:
        return frozenset(who for who, (_, call) in self._calls.items() if call.done() and call.exception() is None)

    def give(self, who: Iterable[ReplicaStart]) -> None:
        """Returns at once."""
        now = time.monotonic()
        for started in who:
            at, before = self._calls.get(started, (0.0, None))
            if before is not None:
                if not before.done() or before.exception() is None or now - at < REPEAT_S:
                    continue
                logger.warning("%s", before.exception())
            self._calls[started] = now, self._pool.call(started, self._path, {}, self._timeout_s)

    def wait(self, limit_s: float) -> None:
        """Wait until the unfinished calls have ended, if there are any, at most `limit_s` seconds."""
        if unfinished := [call for _, call in self._calls.values() if not call.done()]:
            wait(unfinished, limit_s)
        else:
            time.sleep(limit_s)

    def forget(self, started: ReplicaStart) -> None:
        """Forget a replica that has ended."""
        self._calls.pop(started, None)
