"""Rank 0 has the engines start and leave the devices, and knows which occupy them, over real HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from scripted_replica import DIGEST, TOKEN, ScriptedReplica
from waiting import until

from megatron_rl.contract.attempt_records import Hang, ReplicaState
from megatron_rl.contract.codes import REPLICA_GIVEN_UP, REPLICA_RUNNING, REPLICA_WAITING
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.records import read, write
from megatron_rl.generate.refit import engine_control
from megatron_rl.generate.refit.engine_control import EngineControl
from megatron_rl.generate.refit.epoch import NoReplicaLeft
from megatron_rl.generate.replicas.dispatch import Dispatch
from megatron_rl.generate.replicas.link import LinkTimings
from megatron_rl.generate.replicas.links import ALL
from megatron_rl.generate.replicas.pool import ReplicaPool

SOON = LinkTimings(poll_s=0.05, silence_s=1.0, retry_s=0.01, check_s=0.01, log_s=0.05)


class Counted(ScriptedReplica):
    """A replica beside the ranks that counts its commands, and may be slow to sleep."""

    def __init__(self, attempt: Attempt, number: int, start: int = 0) -> None:
        super().__init__(attempt, number, start, beside=True)
        self.commands: list[str] = []
        self.may_sleep = threading.Event()
        self.may_sleep.set()
        self._counted = self.service.app
        self.service.app = self._count

    async def _count(self, scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        if (path := scope["path"]) in ("/start", "/sleep"):
            self.commands.append(path)
        while path == "/sleep" and not self.may_sleep.is_set():
            await asyncio.sleep(0.01)
        await self._counted(scope, receive, send)

    @property
    def started(self) -> tuple[int, int]:
        return self.service.address.replica, self.service.address.start


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    attempt = RunDir(tmp_path).attempt(1)
    attempt.folder.mkdir(parents=True)
    return attempt


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_control, "LOOK_S", 0.0)


@pytest.fixture
def two(attempt: Attempt) -> Iterator[list[Counted]]:
    with Counted(attempt, 0) as one, Counted(attempt, 1) as other:
        yield [one, other]
        for each in (one, other):  # at the same time
            each.hang_up()


@contextmanager
def controlling(attempt: Attempt, replicas: int) -> Iterator[tuple[ReplicaPool, EngineControl]]:
    """A pool that has reached so many replicas."""
    pool = ReplicaPool(Dispatch(attempt, DIGEST, TOKEN, ALL, resumes=True, limit_s=60.0, timings=SOON))
    pool.start()
    try:
        until(lambda: len(pool.starts()) == replicas, f"{replicas} replicas")
        yield pool, EngineControl(pool, attempt)
    finally:
        pool.close()


@pytest.fixture
def control(attempt: Attempt, two: list[Counted]) -> Iterator[EngineControl]:
    """Control of two replicas whose engines have started."""
    with controlling(attempt, 2) as (_, control):
        control.start()
        until(lambda: not control.down(), "both have started")
        yield control


def state(attempt: Attempt, replica: int, state: str, starts: int) -> None:
    attempt.replica(replica).folder.mkdir(parents=True, exist_ok=True)
    write(attempt.replica(replica).state, ReplicaState(replica, state, starts, 0.0))


def leave(control: EngineControl) -> list[tuple[int, int]]:
    control.begin_sleep()
    return control.occupants(10.0)


def test_each_is_told_once_to_start_however_often_the_ranks_look(control: EngineControl, two: list[Counted]) -> None:
    for _ in range(20):
        control.start()
    assert control.missing(2) == []
    assert [each.commands for each in two] == [["/start"]] * 2


def test_all_leave_the_devices_at_once(control: EngineControl, two: list[Counted]) -> None:
    for _ in range(2):
        assert leave(control) == []
    assert [each.commands for each in two] == [["/start", "/sleep", "/sleep"]] * 2


def test_one_that_is_slow_to_leave_occupies_them_until_it_has(control: EngineControl, two: list[Counted]) -> None:
    two[1].may_sleep.clear()
    control.begin_sleep()
    until(lambda: control.occupants(0.1) == [(1, 0)], "the other one sleeps")
    two[1].may_sleep.set()
    assert control.occupants(10.0) == []
    assert two[1].commands == ["/start", "/sleep"]


def test_one_that_was_never_told_to_start_occupies_nothing(attempt: Attempt, two: list[Counted]) -> None:
    with controlling(attempt, 2) as (_, control):
        assert leave(control) == []
        assert two[0].commands == []


def test_one_that_cannot_be_reached_occupies_them_until_the_host_side_sees_its_end(
    attempt: Attempt, control: EngineControl, two: list[Counted]
) -> None:
    two[1].mute = True
    until(lambda: (1, 0) not in control._pool.starts(), "it is lost")
    state(attempt, 1, REPLICA_RUNNING, starts=1)
    control.begin_sleep()
    until(lambda: control.occupants(0.1) == [(1, 0)], "the other one sleeps")
    assert control.occupants(0.1) == [(1, 0)]
    state(attempt, 1, REPLICA_WAITING, starts=1)
    assert control.occupants(0.1) == []


def test_the_next_start_of_a_lost_one_shows_that_it_has_ended(
    attempt: Attempt, control: EngineControl, two: list[Counted]
) -> None:
    two[1].die()
    with Counted(attempt, 1, start=1) as again:
        until(lambda: again.started in control._pool.starts(), "it has come back")
        assert leave(control) == []
        assert again.commands == [], "it has no engine yet"
        again.hang_up()


def test_one_that_comes_back_is_told_again_to_leave(
    control: EngineControl, two: list[Counted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_control, "REPEAT_S", 0.0)
    two[1].mute = True
    until(lambda: (1, 0) not in control._pool.starts(), "it is lost")
    control.begin_sleep()
    until(lambda: control.occupants(0.1) == [(1, 0)], "the other one sleeps")
    two[1].mute = False
    until(lambda: not control.occupants(0.1), "it sleeps")


def test_one_that_does_not_leave_is_reported_once_to_be_ended(attempt: Attempt, control: EngineControl) -> None:
    for _ in range(2):
        control.end([(1, 0)], 121.3)
    reported = read(Hang, attempt.replica(1).hang)
    assert isinstance(reported, Hang)
    assert (reported.rank, reported.silent_s) == (0, 121.3)
    attempt.replica(1).hang.unlink()
    control.end([(1, 0)], 121.5)
    assert not attempt.replica(1).hang.exists()


def test_a_report_that_could_not_be_written_is_repeated(attempt: Attempt, control: EngineControl) -> None:
    attempt.replica(1).hang.mkdir()  # in the way of the file
    control.end([(1, 0)], 121.3)
    attempt.replica(1).hang.rmdir()
    control.end([(1, 0)], 121.5)
    assert attempt.replica(1).hang.is_file()


def test_one_that_is_given_up_is_not_missing(attempt: Attempt, control: EngineControl) -> None:
    state(attempt, 2, REPLICA_WAITING, starts=2)
    state(attempt, 3, REPLICA_GIVEN_UP, starts=6)
    assert control.missing(4) == ["replica 2"]


def test_that_all_are_given_up_is_an_error(attempt: Attempt) -> None:
    for replica in range(2):
        state(attempt, replica, REPLICA_GIVEN_UP, starts=6)
    with controlling(attempt, 0) as (pool, control):
        until(lambda: pool.given_up is not None, "the pool knows")
        with pytest.raises(NoReplicaLeft, match="all inference replicas are given up"):
            control.missing(2)
