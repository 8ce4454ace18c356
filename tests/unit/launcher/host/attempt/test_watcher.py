"""The batch host has steps leave that are asked to, and ends those that hang. Slurm is a list of what it was asked."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.host.attempt import drain, watch
from launcher.host.attempt.context import Here
from launcher.host.attempt.watch import Watcher
from launcher.host.slurm import client
from megatron_rl.contract.codes import HEARTBEAT_WAIT
from megatron_rl.run_dir import read_json, write_json

LIMIT = 1800.0


class Watched:
    """A watcher over two ranks, of which one has hung since `now` - 2000 s."""

    def __init__(self, root: Path) -> None:
        environ = {"MRL_RUN_DIR": str(root), "SLURM_JOB_ID": "7", "MRL_ATTEMPT": "1"}
        self.here = Here(environ)
        self.attempt = self.here.attempt
        self.attempt.heartbeats.mkdir(parents=True)
        self.now = time.time()
        self.send_heartbeats(silent=2000.0)
        self.heard: list[int] = []
        signal.signal(signal.SIGUSR2, lambda number, _: self.heard.append(number))
        options = argparse.Namespace(interrupt=signal.SIGUSR2, notice=60.0)
        self.watcher = Watcher(self.here, options, script=os.getpid())

    def send_heartbeats(self, silent: float) -> None:
        for rank, phase in enumerate([HEARTBEAT_WAIT, "generate"]):
            facts = {"rank": rank, "ranks": 2, "host": "here", "phase": phase, "step": 1, "entered": 1, "every": 10.0}
            write_json(self.attempt.heartbeat(rank), facts | {"at": self.now - silent, "written": self.now})

    def look_again_and_again(self) -> None:
        for seconds in (0.0, 10.0, 20.0):
            self.watcher.look(self.now + seconds)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    monkeypatch.setattr(client, "signal_steps", lambda job, name: calls.append(name))
    monkeypatch.setattr(client, "kill_steps", lambda job: calls.append("KILL"))
    monkeypatch.setattr(watch, "complete", lambda here, notice: None)
    monkeypatch.setattr(watch, "STACKS_LIMIT", 0.0)
    monkeypatch.setenv("MRL_SILENCE_S", str(LIMIT))
    return calls


@pytest.fixture
def watched(tmp_path: Path, asked: list[str]) -> Iterator[Watched]:
    before = signal.getsignal(signal.SIGUSR2)
    yield Watched(tmp_path)
    signal.signal(signal.SIGUSR2, before)


def test_a_hang_is_recorded_and_the_steps_show_their_stacks_before_they_are_ended(watched, asked):
    write_json(watched.attempt.nodes, {"steps": {}})
    watched.look_again_and_again()
    assert asked == ["QUIT", "KILL"]
    hang = read_json(watched.attempt.hang)
    assert (hang["rank"], hang["phase"]) == (1, "generate")


def test_nobody_hangs_before_the_ranks_are_started(watched, asked):
    watched.look_again_and_again()
    assert asked == []


def test_a_slurm_that_did_not_hear_is_told_again(watched, asked, monkeypatch):
    write_json(watched.attempt.nodes, {"steps": {}})

    def silent(job: str) -> None:
        raise client.SlurmSilent("no answer")

    with monkeypatch.context() as busy:
        busy.setattr(client, "kill_steps", silent)
        watched.watcher.look(watched.now)
        with pytest.raises(client.SlurmSilent):
            watched.watcher.look(watched.now + 10)
    watched.watcher.look(watched.now + 11)
    assert asked == ["QUIT", "KILL"]


def test_a_full_disk_keeps_no_hang_from_being_ended(watched, asked, monkeypatch):
    write_json(watched.attempt.nodes, {"steps": {}})

    def full(attempt: object, silence: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(watch, "record_hang", full)
    watched.watcher.look(watched.now)
    with pytest.raises(OSError, match="No space left"):
        watched.watcher.look(watched.now + 10)
    watched.watcher.look(watched.now + 11)
    assert asked == ["QUIT", "KILL"]


@pytest.mark.parametrize("problem", [client.SlurmSilent("no answer"), OSError(errno.ENOSPC, "No space left on device")])
def test_a_look_that_comes_to_nothing_is_not_the_last_one(watched, asked, monkeypatch, problem):
    looks: list[float] = []

    def look(watcher: Watcher, now: float) -> None:
        looks.append(now)
        raise problem

    script = iter([1, 1, 1, 1, 2])
    monkeypatch.setattr(os, "getppid", lambda: next(script))
    monkeypatch.setattr(watch, "TICK", 0.0)
    monkeypatch.setattr(Watcher, "look", look)
    assert watch.watch(watched.here, argparse.Namespace(interrupt=signal.SIGUSR2, notice=60.0)) == 0
    assert len(looks) == 3


def test_when_a_collective_timed_out_all_show_where_they_are_once(watched, asked):
    write_json(watched.attempt.error(0), {"rank": 0, "error": "RuntimeError: Timed out", "waited": True})
    watched.look_again_and_again()
    assert asked == ["QUIT"]


def test_another_error_needs_no_stacks(watched, asked):
    write_json(watched.attempt.error(0), {"rank": 0, "error": "ValueError: bad", "waited": False})
    watched.look_again_and_again()
    assert asked == []


def test_a_request_to_leave_reaches_the_script_and_the_steps_and_its_deadline_is_kept(watched, asked):
    request = {"cause": "preempted", "by": "test", "at": watched.now, "deadline": watched.now + 20}
    write_json(watched.attempt.drain, request)
    watched.watcher.look(watched.now)
    assert (asked, watched.heard) == (["USR1"], [signal.SIGUSR2])
    watched.watcher.look(watched.now + 16)
    watched.watcher.look(watched.now + 17)
    assert asked[1:] == ["KILL"]


def test_the_steps_are_told_before_slurm_is_asked_why(watched, asked, monkeypatch):
    monkeypatch.setattr(watch, "complete", lambda here, notice: asked.append("why?"))
    write_json(watched.attempt.drain, {"cause": "signal", "by": "test", "at": watched.now, "deadline": None})
    watched.watcher.look(watched.now)
    assert asked == ["USR1", "why?"]


def test_a_signal_is_passed_on_before_slurm_is_asked_why(watched, monkeypatch):
    seen: list[str] = []

    def show(job_id: str) -> dict[str, str]:
        seen.append(read_json(watched.attempt.drain)["cause"])
        return {"JobState": "RUNNING", "PreemptTime": "2026-11-21T07:00:00", "EndTime": "2030-11-21T07:00:20"}

    monkeypatch.setattr(client, "show_job", show)
    monkeypatch.setattr(client, "preemption_cancels", lambda job: False)
    drain.drain(watched.here, argparse.Namespace(signal="USR1", notice=60.0))
    request = read_json(watched.attempt.drain)
    assert (seen, request["cause"], request["by"]) == (["signal"], "preempted", "SIGUSR1 to the batch script")
    assert request["deadline"] == request["end"] > watched.now


def test_ranks_that_have_said_how_it_ended_are_not_asked_again(watched, asked):
    write_json(watched.attempt.drain, {"cause": "preempted", "by": "test", "at": watched.now, "deadline": None})
    write_json(watched.attempt.outcome, {"outcome": "drained", "step": 3})
    watched.look_again_and_again()
    assert asked == []
