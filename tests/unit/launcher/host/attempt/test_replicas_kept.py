"""The host side starts, watches and restarts the replicas of an attempt. Their ranks are scripted."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from launcher.host.attempt.interfaces import ReplicaRanks
from launcher.host.attempt.replicas import Replicas
from launcher.host.judge.verdict import RankExit
from launcher.host.record.evidence import Observed, read_replicas
from megatron_rl.contract.attempt_records import Hang, Heartbeat, Outcome, RankError, ReplicaAddress
from megatron_rl.contract.codes import (
    FINISHED,
    REPLICA_FINISHED,
    REPLICA_GIVEN_UP,
    REPLICA_RUNNING,
    REPLICA_WAITING,
    STACKS_LIMIT_S,
)
from megatron_rl.contract.heartbeat_files import write_heartbeat
from megatron_rl.contract.paths import Attempt, Replica, RunDir
from megatron_rl.contract.records import ABSENT, read, write

SILENCE_S = 100.0


class Scripted(ReplicaRanks):
    """Ranks that end when a test says so."""

    hosts = ("n7",)

    def __init__(self) -> None:
        self.exit: RankExit | None = None
        self.asked: list[str] = []

    def observed(self, now: float) -> Observed | None:
        return Observed(exits=[self.exit], code=self.exit.code) if self.exit else None

    def signal(self, signum: int) -> None:
        self.asked.append(signal.Signals(signum).name)

    def end(self, now: float, hurried: bool) -> None:
        self.asked.append("end now" if hurried else "end")
        self.exit = RankExit(0, -signal.SIGKILL)

    def close(self) -> None:
        self.asked.append("close")


class Kept:
    """The replicas of an attempt, and all their ranks in the order of their starts."""

    def __init__(self, root: Path, count: int) -> None:
        self.attempt: Attempt = RunDir(root).attempt(1)
        self.started: list[tuple[int, int, Scripted]] = []
        self.refuse: set[int] = set()
        files = [self.attempt.replica(number) for number in range(count)]
        self.replicas = Replicas(files, self._start, SILENCE_S)

    def _start(self, files: Replica, start: int) -> ReplicaRanks:
        if (number := files.number) in self.refuse:
            raise OSError("no more processes")
        self.started.append((number, start, Scripted()))
        return self.started[-1][2]

    def at(self, now: float) -> list[tuple[int, int]]:
        """Replica and start of all ranks that were ever started, after a look at this time."""
        self.replicas.poll(now)
        return [(number, start) for number, start, _ in self.started]

    @property
    def states(self) -> list[tuple[str, int]]:
        return [(each.state, each.starts) for each in read_replicas(self.attempt)]


@pytest.fixture
def one(tmp_path: Path) -> Kept:
    return Kept(tmp_path, 1)


def fail(kept: Kept, rank: int = 0, code: int = 1, error: str = "RuntimeError: boom") -> None:
    """The newest ranks report an error and end."""
    files = kept.attempt.replica(0)
    write(files.error(rank), RankError(rank, "n7", 0, "generate", error, exit_code=code))
    kept.started[-1][2].exit = RankExit(rank, code)


def test_one_that_ended_is_started_again_after_a_pause(one):
    assert one.at(0.0) == [(0, 0)]
    assert one.states == [(REPLICA_RUNNING, 1)]
    fail(one, rank=1)
    assert one.at(10.0) == one.at(14.0) == [(0, 0)]
    (state,) = read_replicas(one.attempt)
    assert (state.state, state.why) == (REPLICA_WAITING, "infer-0 rank 1 on n7: RuntimeError: boom")
    assert one.at(15.0) == [(0, 0), (0, 1)]
    (state,) = read_replicas(one.attempt)
    assert (state.state, state.starts, state.hosts) == (REPLICA_RUNNING, 2, ["n7"])
    assert state.why == "infer-0 rank 1 on n7: RuntimeError: boom", "so that a view can tell why it was started twice"


def test_a_start_finds_nothing_of_the_one_before(one):
    one.at(0.0)
    files = one.attempt.replica(0)
    write(files.listener, ReplicaAddress(0, 0, "n7", 1, 1, "", 1, 0.0))
    files.address("world-0").parent.mkdir()
    files.heartbeats.mkdir()
    fail(one)
    one.at(1.0)
    one.at(10.0)
    assert read(ReplicaAddress, files.listener) is ABSENT
    assert files.errors() == []
    assert not files.heartbeats.exists()
    assert not files.address("world-0").parent.exists()


def test_one_that_the_run_needs_no_more_stays_finished(one):
    one.at(0.0)
    write(one.attempt.replica(0).outcome, Outcome(FINISHED))
    one.started[-1][2].exit = RankExit(0, 0)
    assert one.at(10.0) == one.at(1e6) == [(0, 0)]
    assert one.states == [(REPLICA_FINISHED, 1)]


def test_a_wrong_configuration_gives_it_up(one):
    one.at(0.0)
    fail(one, code=78)
    one.at(1.0)
    assert one.at(1e6) == [(0, 0)]
    (state,) = read_replicas(one.attempt)
    assert (state.state, state.misconfigured) == (REPLICA_GIVEN_UP, True)


def test_one_that_is_silent_is_asked_where_it_is_then_killed_and_started_again(one):
    one.at(0.0)
    ranks = one.started[0][2]
    files = one.attempt.replica(0)
    files.heartbeats.mkdir()
    write_heartbeat(files.heartbeats, Heartbeat(0, 1, "n7", "generate", 0, 0, 0.0, 0.0, 10.0))
    for now in (20.0, 60.0, 100.0):
        one.at(now)
    assert ranks.asked == []
    one.at(20.0 + SILENCE_S + 1.0)
    assert ranks.asked == ["SIGQUIT"]
    one.at(20.0 + SILENCE_S + 1.0 + STACKS_LIMIT_S)
    assert ranks.asked == ["SIGQUIT", "end now", "close"]
    (state,) = read_replicas(one.attempt)
    assert state.state == REPLICA_WAITING
    assert "silent for" in state.why


def test_one_that_the_training_ranks_report_is_ended_although_it_is_not_silent_and_its_next_start_is_not(one):
    one.at(0.0)
    ranks, files = one.started[0][2], one.attempt.replica(0)
    files.heartbeats.mkdir()

    def beat(now: float) -> None:
        write_heartbeat(files.heartbeats, Heartbeat(0, 1, "n7", "serving", 0, 0, now, now, 10.0))
        one.at(now)

    write(files.hang, Hang(0, None, "leaving the devices of the ranks", 0, 120.0, 15.0))
    beat(20.0)
    beat(20.0 + STACKS_LIMIT_S)
    assert ranks.asked == ["SIGQUIT", "end now", "close"]
    (state,) = read_replicas(one.attempt)
    assert state.why == "infer-0 rank 0: silent for 120 s"
    for now in (40.0, 60.0):
        beat(now)
    assert one.started[1][2].asked == []


def test_one_that_cannot_be_started_keeps_no_other_from_it_and_is_tried_again(tmp_path):
    two = Kept(tmp_path, 2)
    two.refuse = {0}
    with pytest.raises(OSError, match="no more processes"):
        two.at(0.0)
    assert [(number, start) for number, start, _ in two.started] == [(1, 0)]
    two.refuse = set()
    assert two.at(1.0) == [(1, 0), (0, 0)]


def test_a_state_that_the_disk_does_not_take_is_written_later(one, monkeypatch):
    def full(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("launcher.host.attempt.replicas.write", full)
        with pytest.raises(OSError, match="disk full"):
            one.at(0.0)
    assert one.at(1.0) == [(0, 0)], "it runs all the same"
    assert one.states == [(REPLICA_RUNNING, 1)]
