"""While the steps run: they leave when they are asked to, and are ended when they hang. What they and Slurm were asked
is a list."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.host.attempt import runner as runner_module
from launcher.host.attempt.interfaces import AttemptJob, Steps
from launcher.host.attempt.runner import LEAVE_LIMIT_S, AttemptRunner
from launcher.host.judge.policy import Facts
from launcher.host.judge.verdict import RankExit
from launcher.host.process.signals import Signals
from launcher.host.slurm.call import SlurmSilent
from megatron_rl.contract.attempt_records import AttemptEnd, Drain, Hang, Heartbeat, Outcome, RankError
from megatron_rl.contract.codes import HEARTBEAT_WAIT
from megatron_rl.contract.heartbeat_files import write_heartbeat
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.records import PATIENCE_S, Unreadable, if_readable, read, write

LIMIT = 1800.0
HOUR = 3600.0
FULL = OSError(errno.ENOSPC, "No space left on device")
SILENT = SlurmSilent("no answer")


class AskedToLeave(Steps):
    """Steps, and a job around them, that only note what they were asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def signal(self, signum: int) -> None:
        self.calls.append(signal.Signals(signum).name)

    def end(self, now: float, hurried: bool) -> None:
        if "KILL" not in self.calls:
            self.calls.append("KILL")


class ScriptedJob(AttemptJob):
    takes_nodes = True

    def __init__(self, asked: AskedToLeave) -> None:
        self.asked = asked
        self.knows: dict[str, Any] = {}

    def request_for(self, signal_name: str, now: float) -> Drain:
        return Drain("signal", f"{signal_name} to the batch host", now)

    def complete(self, attempt: Attempt, request: Drain) -> Drain:
        self.asked.calls.append("why?")
        return request._replace(**self.knows)

    def final_request(self, attempt: Attempt, request: Drain | None, drained: bool) -> Drain | None:
        return request

    def facts(self, attempt: Attempt, request: Drain | None) -> Facts:
        return Facts()

    def bring_back(self, attempt: Attempt, end: AttemptEnd, returning: bool) -> None:
        pass


class Watched:
    """An attempt of two ranks, of which one has hung for 2000 s of its 1800."""

    def __init__(self, root: Path) -> None:
        self.asked = AskedToLeave()
        self.job = ScriptedJob(self.asked)
        self.attempt = RunDir(root).attempt(1)
        self.attempt.heartbeats.mkdir(parents=True)
        self.now = time.time()
        self.passed = self.jumped = 0.0  # seconds since then, and by which the wall clock was set forward
        self.signals = Signals([signal.SIGUSR2])
        self.runner = AttemptRunner(self.attempt, self.asked, self.job, self.signals, LIMIT, wall=self.wall)
        self.send_heartbeats(silent=2000.0)

    def wall(self) -> float:
        return self.now + self.passed + self.jumped

    def send_heartbeats(self, silent: float) -> None:
        for rank, phase in enumerate([HEARTBEAT_WAIT, "generate"]):
            beat = Heartbeat(rank, 2, "here", phase, 1, 1, self.wall() - silent, self.wall(), 10.0)
            write_heartbeat(self.attempt.heartbeats, beat)

    def poll(self, *seconds: float) -> list[str]:
        """Poll at these times; return the new requests."""
        before = len(self.asked.calls)
        for after in seconds:
            self.passed = after
            self.runner.poll(self.now + after)
        return self.asked.calls[before:]

    def train(self) -> Watched:
        self.runner.training = True
        return self

    def ask(self, cause: str = "preempted", **facts: float) -> None:
        write(self.attempt.drain, Drain(cause, "test", self.wall() - self.passed, **facts))


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR2, signal.SIGCHLD)}
    yield Watched(tmp_path)
    for number, handler in before.items():
        signal.signal(number, handler)


def failing(times: int, error: Exception, then: Callable[..., Any]) -> Callable[..., Any]:
    left = [error] * times

    def act(*given: Any, **named: Any) -> Any:
        if left:
            raise left.pop()
        return then(*given, **named)

    return act


def test_a_hang_is_recorded_and_the_steps_show_their_stacks_before_they_are_ended(watched):
    assert watched.train().poll(0, 10, 11, 12, 20) == ["SIGQUIT", "KILL"]
    hang = read(Hang, watched.attempt.hang)
    assert (hang.rank, hang.phase) == (1, "generate")
    assert watched.runner.observed().hang == hang


@pytest.mark.parametrize(("first", "then"), [(100.0, 60.0), (60.0, 100.0)])
def test_of_two_deadlines_the_earlier_one_counts(watched, first, then):
    watched.send_heartbeats(silent=0.0)
    watched.train().ask(deadline=watched.now + first)
    assert "KILL" not in watched.poll(0)
    watched.ask(deadline=watched.now + then)
    assert "KILL" not in watched.poll(50)
    assert "KILL" in watched.poll(56)


def test_of_two_requests_the_first_says_why_and_the_earlier_deadline_by_when(watched):
    for cause, seconds in (("signal", None), ("preempted", 100.0), ("cancelled", 60.0), ("requeue", 80.0)):
        deadline = None if seconds is None else watched.now + seconds
        watched.runner.ask_to_leave(Drain(cause, "test", watched.now, deadline=deadline))
    assert watched.runner.request == Drain("signal", "test", watched.now, deadline=watched.now + 60)
    watched.train().send_heartbeats(silent=0.0)
    assert "KILL" not in watched.poll(0, 54)
    assert "KILL" in watched.poll(55)


@pytest.mark.parametrize("jump", [-5 * HOUR, 5 * HOUR])
def test_a_clock_that_is_set_moves_no_deadline_and_makes_nobody_silent(watched, jump):
    watched.send_heartbeats(silent=0.0)
    watched.train().ask(deadline=watched.now + 60)
    assert "KILL" not in watched.poll(0, 1)
    watched.jumped = jump
    watched.send_heartbeats(silent=0.0)
    assert "KILL" not in watched.poll(2, 10, 20, 54)
    assert "KILL" in watched.poll(55)
    assert watched.runner.observed().hang is None


def test_a_deadline_that_is_asked_for_after_the_clock_was_set_counts_from_then(watched):
    watched.send_heartbeats(silent=0.0)
    watched.train().poll(0)
    watched.jumped = 5 * HOUR
    watched.ask(deadline=watched.wall() + 60)
    assert "KILL" not in watched.poll(1, 54)
    assert "KILL" in watched.poll(55)


def test_a_clock_set_back_before_a_request_is_read_leaves_no_more_time_than_it_gave(watched):
    watched.send_heartbeats(silent=0.0)
    watched.train().ask(deadline=watched.now + 60)
    watched.jumped = -5 * HOUR
    assert "KILL" not in watched.poll(0, 54)
    assert "KILL" in watched.poll(55)


@pytest.mark.parametrize("jump", [-5 * HOUR, 5 * HOUR])
def test_once_a_rank_has_left_a_clock_that_is_set_gives_the_others_their_minute(watched, jump):
    watched.asked.end_together = watched.job.takes_nodes = False
    watched.train().send_heartbeats(silent=0.0)
    watched.asked.exits = lambda: [RankExit(1, 0)]
    watched.poll(0)
    watched.jumped = jump
    assert "KILL" not in watched.poll(LEAVE_LIMIT_S - 1)
    assert "KILL" in watched.poll(LEAVE_LIMIT_S)


def test_a_request_that_somebody_has_replaced_stands_as_he_wrote_it(watched):
    watched.train().send_heartbeats(silent=0.0)
    watched.ask(deadline=watched.now + 60)
    watched.poll(0)
    watched.ask("cancelled", deadline=watched.now + 100)
    watched.poll(1, 2)
    assert watched.runner.request == read(Drain, watched.attempt.drain)
    assert (watched.runner.request.cause, watched.runner.request.deadline) == ("cancelled", watched.now + 100)


def test_but_for_an_earlier_deadline_of_ours_that_the_disk_has_not_taken_yet(watched, monkeypatch):
    watched.train().send_heartbeats(silent=0.0)
    watched.runner.ask_to_leave(Drain("preempted", "us", watched.now, deadline=watched.now + 60))
    monkeypatch.setattr(runner_module, "write", failing(99, FULL, write))
    watched.poll(0)
    watched.ask("cancelled", deadline=watched.now + 100)
    watched.poll(1)
    monkeypatch.undo()
    watched.poll(2)
    assert read(Drain, watched.attempt.drain) == Drain("cancelled", "test", watched.now, deadline=watched.now + 60)


def test_once_a_rank_has_left_the_others_have_a_minute_to_follow(watched):
    """Nothing else ends the other ranks with the first one on this machine."""
    watched.asked.end_together = watched.job.takes_nodes = False
    watched.train().send_heartbeats(silent=0.0)
    watched.asked.exits = lambda: [RankExit(1, 0)]
    assert "KILL" not in watched.poll(0, LEAVE_LIMIT_S - 1)
    assert "KILL" in watched.poll(LEAVE_LIMIT_S)
    assert watched.runner.observed().late == "rank 1 left, the others did not follow"


def test_nobody_hangs_before_the_ranks_are_started(watched):
    assert watched.poll(0, 10, 20) == []


def test_slurm_is_told_again_what_it_did_not_hear(watched, monkeypatch):
    monkeypatch.setattr(watched.asked, "end", failing(2, SILENT, watched.asked.end))
    monkeypatch.setattr(watched.asked, "signal", failing(2, SILENT, watched.asked.signal))
    assert watched.train().poll(0, 10, 12, 13, 14) == ["SIGQUIT", "KILL"]


def test_a_full_disk_keeps_no_hang_from_being_ended(watched, monkeypatch):
    monkeypatch.setattr(runner_module, "write", failing(9, FULL, write))
    assert watched.train().poll(0, 10, 11, 12, 13) == ["SIGQUIT", "KILL"]
    assert watched.runner.observed().hang is not None, "it is known here all the same"


def test_when_a_collective_timed_out_all_show_where_they_are_once(watched):
    write(watched.attempt.error(0), RankError(0, "here", 1, "train", "RuntimeError: Timed out", waited=True))
    watched.send_heartbeats(silent=0.0)
    assert watched.train().poll(0, 10, 20) == ["SIGQUIT"]


def test_another_error_needs_no_stacks(watched):
    write(watched.attempt.error(0), RankError(0, "here", 1, "train", "ValueError: bad"))
    watched.send_heartbeats(silent=0.0)
    assert watched.train().poll(0, 10, 20) == []


def test_a_request_to_leave_reaches_the_steps_and_its_deadline_is_kept(watched):
    watched.send_heartbeats(silent=0.0)
    watched.ask(deadline=watched.now + 20)
    assert watched.train().poll(0) == ["SIGUSR1"]
    assert watched.poll(1, 4, 6) == ["SIGUSR1"], "reminded, but not at every look"
    assert watched.poll(14) == ["SIGUSR1"]
    assert watched.poll(15, 16, 17) == ["KILL"], "the last moment is needed to close the attempt"
    assert watched.runner.observed().late is None, "whoever takes the nodes is to blame"


@pytest.mark.parametrize("written", [True, False], ids=["the disk takes it", "the disk is full"])
def test_a_signal_is_passed_on_before_slurm_is_asked_why(watched, monkeypatch, written):
    watched.train().send_heartbeats(silent=0.0)
    if not written:
        monkeypatch.setattr(runner_module, "write", failing(99, FULL, write))
    os.kill(os.getpid(), signal.SIGUSR2)
    assert watched.poll(0) == ["SIGUSR1", "why?"]
    request = if_readable(read(Drain, watched.attempt.drain))
    assert (request is not None) is written
    assert watched.runner.request == Drain("signal", "SIGUSR2 to the batch host", watched.now)


def test_a_disk_that_was_full_for_a_moment_loses_no_request(watched, monkeypatch):
    watched.train().send_heartbeats(silent=0.0)
    watched.job.knows = {"cause": "preempted", "deadline": watched.now + 60, "end": watched.now + 60}
    monkeypatch.setattr(runner_module, "write", failing(2, FULL, write))
    os.kill(os.getpid(), signal.SIGUSR2)
    watched.poll(0, 1, 2, 3, 4)
    assert read(Drain, watched.attempt.drain).cause == "preempted"


def test_slurm_is_asked_once_a_second_and_not_for_ever(watched):
    watched.train().send_heartbeats(silent=0.0)
    watched.ask("signal")
    assert watched.poll(0, 0.1, 0.2, 0.9, 1.1).count("why?") == 2
    assert watched.poll(*range(2, 100)).count("why?") == 8


def test_what_slurm_says_is_added_unless_somebody_has_named_a_cause_meanwhile(watched, monkeypatch):
    watched.train().send_heartbeats(silent=0.0)
    watched.ask("signal")
    watched.job.knows = {"cause": "time limit", "deadline": watched.now + 90}

    def meanwhile(attempt: Attempt, request: Drain) -> Drain:
        watched.ask("cancelled")
        return request._replace(cause="time limit")

    monkeypatch.setattr(watched.job, "complete", meanwhile)
    watched.poll(0)
    assert read(Drain, watched.attempt.drain).cause == "cancelled"
    monkeypatch.undo()
    watched.poll(1, 2)
    assert read(Drain, watched.attempt.drain).deadline == watched.now + 90
    assert watched.runner.request.cause == "time limit"


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_a_request_that_cannot_be_read_is_one_and_a_later_signal_is_passed_on(watched, content):
    watched.train().send_heartbeats(silent=0.0)
    watched.attempt.drain.write_text(content)
    assert watched.poll(0, PATIENCE_S - 1) == []
    assert "SIGUSR1" in watched.poll(PATIENCE_S, PATIENCE_S + 1)
    watched.ask(deadline=watched.now + 20)
    assert watched.poll(PATIENCE_S + 2, 15, 16)[-1] == "KILL"


def test_a_file_system_that_fails_for_moments_asks_nobody_to_leave(watched, monkeypatch):
    watched.train().send_heartbeats(silent=0.0)
    for moment in range(10):
        with monkeypatch.context() as patch:
            patch.setattr(runner_module, "read", lambda _, path: Unreadable(str(path), "Input/output error"))
            assert watched.poll(10 * moment, 10 * moment + PATIENCE_S - 1) == []
        assert watched.poll(10 * moment + PATIENCE_S) == []
    assert watched.runner.request is None


def test_ranks_that_have_said_how_it_ended_are_not_asked_again(watched):
    watched.train().ask()
    write(watched.attempt.outcome, Outcome("drained", 3))
    watched.send_heartbeats(silent=0.0)
    assert set(watched.poll(0, 10, 20)) <= {"why?"}


def test_a_wait_ends_with_what_it_waits_for_or_with_a_request(watched):
    looks = iter([False, False, True])
    watched.asked.tick_s = 0.0
    watched.runner.wait(lambda: next(looks), through_requests=False)
    watched.ask()
    watched.runner.wait(lambda: False, through_requests=False)
    assert watched.runner.request.cause == "preempted"


def test_a_signal_wakes_a_wait(watched):
    watched.asked.tick_s = 3600.0
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGUSR2))
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    watched.runner.wait(lambda: False, through_requests=False)
