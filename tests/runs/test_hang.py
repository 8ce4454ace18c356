"""A run that hangs ends as a crash, and the rank that the others wait for is named, with everybody's stacks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from core_helpers import tiny_model
from loop_helpers import loop_recipe, prepare
from run_helpers import FAKE_RANK

from launcher.host.process.processes import start_time
from launcher.host.record.heartbeats import HangWatch
from launcher.host.record.ledger import ends_in, read_ledger
from megatron_rl.contract.attempt_records import AttemptEnd, Hang, Heartbeat
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import if_readable, read, write


class Supervised:
    """A supervisor and two ranks, fake ones where a script says what they do."""

    def __init__(self, run: RunDir, *options: str, script: str | None = None, **environment: str) -> None:
        self.run, self.attempt = run, run.attempt(1)
        self.attempt.folder.mkdir(parents=True)
        command = [sys.executable, "-m", "launcher.host.supervise", "--run-dir", str(run.root), "--attempt", "1"]
        command += ["--ranks", "2", "--device", "cpu", "--grace", "1", *options]
        command += ["--", sys.executable, FAKE_RANK, script] if script else []
        self.process = subprocess.Popen(command, start_new_session=True, env={**os.environ, **environment})

    def end(self, limit: float = 30) -> AttemptEnd:
        """The ledger's line."""
        assert self.process.wait(limit) == 1, self.logs()
        return ends_in(read_ledger(self.run))[-1]

    def wait_for(self, what: Callable[[], object], limit: float = 60) -> None:
        give_up = time.monotonic() + limit
        while not what():
            assert self.process.poll() is None, self.logs()
            assert time.monotonic() < give_up, f"waited in vain\n{self.logs()}"
            time.sleep(0.05)

    def rank_pid(self, rank: int) -> int:
        """Of a real rank."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes().split(b"\0")
                command = (folder / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if f"MRL_PARENT_PID={self.process.pid}".encode() in environment and f"RANK={rank}".encode() in environment:
                assert b"megatron_rl.rank_main" in command
                return int(folder.name)
        raise AssertionError(f"no rank {rank}\n{self.logs()}")

    def logs(self) -> str:
        return "\n".join(file.read_text()[-3000:] for file in sorted(self.attempt.logs.glob("*")))


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Callable[..., Supervised]]:
    started: list[Supervised] = []

    def supervise(*options: str, script: str | None = None, run: RunDir | None = None, **environment: str):
        started.append(Supervised(run or RunDir(tmp_path), *options, script=script, **environment))
        return started[-1]

    yield supervise
    for one in started:
        one.process.kill()
        one.process.wait()


def test_the_rank_that_the_other_waits_for_is_named_and_both_show_their_stacks(supervise):
    run = supervise("--silence-limit", "2", script="waits,hangs")
    end = run.end()
    assert (end.outcome, end.rank, end.phase, end.step, end.hung) == ("crashed", 1, "generate", 3, True)
    assert end.node == os.uname().nodename
    assert end.error.endswith("(stacks: logs/attempt-001/train.1.stacks)")
    for rank in (0, 1):
        assert "in hang" in run.attempt.stacks(rank).read_text()
    assert read(Hang, run.attempt.hang).rank == 1


def test_a_stopped_process_is_named_although_the_other_one_works_on(supervise):
    run = supervise("--silence-limit", "2", script="beats,stopped")
    end = run.end()
    assert (end.rank, end.hung) == (1, True)
    assert "in hang" in run.attempt.stacks(0).read_text()
    assert start_time(int((run.attempt.folder / "pid.1").read_text())) is None


def test_a_rank_that_works_keeps_the_run_alive_while_the_other_waits(supervise):
    run = supervise("--silence-limit", "1", script="beats,waits")
    run.wait_for(run.attempt.heartbeat(1).exists)
    time.sleep(3)
    assert run.process.poll() is None
    assert not run.attempt.hang.exists()


def test_without_a_limit_nobody_hangs(supervise):
    run = supervise(script="hangs")
    run.wait_for(run.attempt.heartbeat(0).exists)
    time.sleep(1)
    assert run.process.poll() is None


def test_a_rank_that_waited_in_vain_in_a_collective_names_the_one_that_did_not_come(supervise):
    end = supervise(script="collects").end()
    assert (end.rank, end.phase, end.hung) == (1, "generate", True)
    assert "while rank 0 waited for it: RuntimeError: " in end.error
    assert "Timed out" in end.error


def test_the_others_show_where_they_are_when_a_rank_fails(supervise):
    run = supervise(script="hangs,consequence")
    assert run.end().rank == 1
    assert "in hang" in run.attempt.stacks(0).read_text()


def test_a_rank_that_dies_of_being_asked_where_it_is_did_not_fail_first(supervise):
    end = supervise(script="consequence,fragile").end()
    assert (end.rank, end.error) == (0, "RuntimeError: connection closed by peer")


def test_an_import_that_fails_is_the_error_although_nothing_could_be_reported(supervise):
    assert supervise(script="unable").end().error.endswith("its log ends: ImportError: No module named 'torch'")


def test_a_laptop_that_was_closed_is_no_hang(tmp_path):
    attempt = RunDir(tmp_path).attempt(1)
    attempt.heartbeats.mkdir(parents=True)
    write(attempt.heartbeat(0), Heartbeat(0, 1, "here", "train", 1, 1, 1000.0, 1000.0, 10.0))
    hangs = HangWatch(attempt, limit=1800.0)
    for now in (1000.0, 1010.0, 9000.0):
        assert hangs.look(now) is None
    assert hangs.look(9010.0).rank == 0, "it has had the time to send one since"


def start_real(supervise: Callable[..., Supervised], tmp_path: Path, *options: str) -> Supervised:
    untaught = tiny_model(init="from-scratch").model_dump()
    recipe = loop_recipe(model=untaught, training={"steps": 1000}, save={"every": 0}, evaluation={"every": 0})
    run: Supervised = supervise(*options, run=prepare(tmp_path / "run", recipe))
    run.wait_for(
        lambda: (beat := if_readable(read(Heartbeat, run.attempt.heartbeat(1)))) is not None and beat.step >= 2
    )
    return run


def test_a_real_rank_that_is_stopped_is_named_with_the_stack_of_the_other(supervise, tmp_path):
    run = start_real(supervise, tmp_path, "--silence-limit", "8")
    os.kill(run.rank_pid(1), signal.SIGSTOP)
    end = run.end()
    assert (end.outcome, end.rank, end.hung) == ("crashed", 1, True)
    assert end.step >= 2
    assert "train_rl.py" in run.attempt.stacks(0).read_text()


def test_a_real_rank_that_is_killed_takes_the_other_along_within_seconds(supervise, tmp_path):
    run = start_real(supervise, tmp_path, "--silence-limit", "60")
    began = time.monotonic()
    os.kill(run.rank_pid(1), signal.SIGKILL)
    end = run.end()
    assert time.monotonic() - began < 10  # the collective's own limit is 30 s
    assert (end.rank, end.hung) == (1, False)
    assert "SIGKILL" in end.error
    assert end.phase
