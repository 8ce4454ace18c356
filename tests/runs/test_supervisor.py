"""The supervisor starts ranks, relays drains, ends hanging ranks, judges, and leaves no process or file behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from run_helpers import Supervised, supervised_at_once
from waiting import until

from launcher.host.attempt.local_ranks import KEPT_MEMORY, WAITING_THREADS
from launcher.host.process.lock import owner_of
from launcher.host.process.processes import start_time
from launcher.host.record.ledger import ends_in, read_ledger
from megatron_rl.contract.attempt_records import Drain, Outcome
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.records import read, write
from megatron_rl.contract.run_records import Done


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Callable[..., Supervised]]:
    def supervise(script: str, *options: str, number: int = 1, ranks: int = 2, root: Path = tmp_path) -> Supervised:
        return started.enter_context(Supervised(RunDir(root), script, *options, number=number, ranks=ranks))

    with ExitStack() as started:
        yield supervise


BOOM = "RuntimeError: boom"
FAILURES = {
    "long,crash": (1, "crashed", 1, BOOM),
    "consequence,crash": (1, "crashed", 1, BOOM),  # the first of several errors is the cause
    "stubborn,crash": (1, "crashed", 1, BOOM),  # a hanging rank that ignores SIGTERM is killed
    "misconfigured": (78, "misconfigured", None, ""),
    "long,segfault": (1, "crashed", 1, "SIGSEGV"),
    "liar": (1, "crashed", None, "without recording an outcome"),  # exit code 75
}
"""Behaviour of the ranks -> exit code; outcome, rank (None: any) and words of the error on record."""
PATIENT = {"consequence,crash": ("--grace", "30")}


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Supervised]]:
    with supervised_at_once(tmp_path_factory.mktemp, {one: PATIENT.get(one, ()) for one in FAILURES}) as started:
        yield started


@pytest.mark.parametrize("script", FAILURES)
def test_failure_of_a_rank_ends_all_and_is_the_verdict(failures, script):
    run, (code, outcome, rank, error) = failures[script], FAILURES[script]
    assert run.wait() == code
    assert run.end.outcome == outcome
    assert rank in (None, run.end.rank)
    assert error in (run.end.error or "")
    assert run.survivors() == []
    assert not run.run.done.exists()
    if script == "consequence,crash":
        assert len(run.attempt.errors()) == 2


def test_finished_attempt_is_recorded_and_writes_the_done_file(supervise):
    run = supervise("train")
    assert run.wait() == 0
    assert read(Done, run.run.done).step == 5
    start, end = read_ledger(run.run)
    assert (start.attempt, start.pid) == (1, run.process.pid)
    assert (end.outcome, end.step, end.error, end.cause) == ("finished", 5, None, None)
    assert end.seconds > 0
    assert "rank 1 is here" in (run.run.root / "logs" / "latest" / "train.1.log").read_text()
    assert owner_of(run.run.lock) is None


def test_ranks_get_their_identity_in_the_environment(supervise, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    for name in (*WAITING_THREADS, *KEPT_MEMORY):
        monkeypatch.delenv(name, raising=False)
    run = supervise("train", "--threads", "3")
    run.wait()
    assert json.loads((run.attempt.folder / "env.1.json").read_text()) == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "3",
        "MKL_NUM_THREADS": "3",
        **WAITING_THREADS,
        **KEPT_MEMORY,
        "PYTHONHASHSEED": "0",
        "CUDA_VISIBLE_DEVICES": "",
    }


def test_gpus_chosen_by_the_user_reach_the_ranks(supervise, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3")
    run = supervise("train", "--device", "cuda")
    assert run.wait() == 0
    assert json.loads((run.attempt.folder / "env.0.json").read_text())["CUDA_VISIBLE_DEVICES"] == "5,3"


def test_children_of_a_rank_end_with_it(supervise):
    run = supervise("parent")
    assert run.wait() == 0
    assert list(run.attempt.folder.glob("child.*"))
    until(lambda: run.survivors() == [])


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_signal_drains_the_run(supervise, signum):
    run = supervise("long")
    run.wait_for_ranks()
    run.process.send_signal(signum)
    assert run.wait() == 75
    assert (run.end.outcome, run.end.cause) == ("drained", signum.name)
    assert run.end.step == read(Outcome, run.attempt.outcome).step
    assert read(Drain, run.attempt.drain).by == "supervisor"
    assert not run.run.done.exists()


def ask(attempt: Attempt, seconds: float) -> None:
    now = time.time()
    write(attempt.drain, Drain("test", "test", now, now + seconds))


def test_drain_file_drains_the_run(supervise):
    run = supervise("long")
    run.wait_for_ranks()
    ask(run.attempt, 30)
    assert run.wait() == 75
    assert run.end.cause == "test"


def test_unwritable_log_does_not_prevent_a_save(supervise, tmp_path):
    log = RunDir(tmp_path).attempt(1).log(0, role="supervisor")
    log.parent.mkdir(parents=True)
    log.symlink_to("/dev/full")
    run = supervise("long")
    run.wait_for_ranks()
    ask(run.attempt, 30)
    assert run.wait() == 75
    assert (run.end.outcome, run.end.step) == ("drained", read(Outcome, run.attempt.outcome).step)


def test_drain_reaches_ranks_that_are_still_starting(supervise):
    run = supervise("late", "--drain-limit", "30")
    run.wait_for_ranks()
    ask(run.attempt, 30)
    assert run.wait() == 75


def test_ranks_that_do_not_drain_in_time_are_ended(supervise):
    run = supervise("stubborn")
    pids = run.wait_for_ranks()
    ask(run.attempt, 0.5)
    assert run.wait() == 1
    assert "no save within" in run.end.error
    assert not any(map(start_time, pids))


def test_second_request_shortens_a_drain(supervise):
    run = supervise("stubborn")
    run.wait_for_ranks()
    ask(run.attempt, 600)
    time.sleep(0.3)
    ask(run.attempt, 0)
    assert run.wait(5) == 1


def test_ranks_die_with_a_killed_supervisor_and_the_next_attempt_says_so(supervise):
    run = supervise("long")
    pids = run.wait_for_ranks()
    run.process.kill()
    until(lambda: not any(map(start_time, pids)))
    again = supervise("train", number=2)
    assert again.wait() == 0
    assert [end.attempt for end in ends_in(read_ledger(run.run)) if end.outcome == "lost"] == [1]


def test_death_of_its_owner_drains_the_run(supervise):
    owner = subprocess.Popen(["sleep", "60"])
    run = supervise("long", "--owner", f"{owner.pid}:{start_time(owner.pid)}")
    run.wait_for_ranks()
    owner.kill()  # it stays a zombie until it is waited for
    assert run.wait() == 75
    assert "gone" in run.end.cause
    owner.wait()


def test_second_owner_of_a_run_is_refused(supervise):
    first = supervise("long")
    first.wait_for_ranks()
    second = supervise("train", number=1)
    assert second.wait() == 2
    assert f"pid {first.process.pid}" in second.process.stderr.read()
    assert first.process.poll() is None


def test_attempt_with_a_newer_successor_does_not_start(supervise, tmp_path):
    RunDir(tmp_path).attempt(2).folder.mkdir(parents=True)
    run = supervise("train", number=1)
    assert run.wait() == 2
    assert "overtaken by attempt 2" in run.process.stderr.read()


def test_finished_run_is_not_started_again(supervise, tmp_path):
    write(RunDir(tmp_path).done, Done(1, 5, 0.0))
    run = supervise("crash")
    assert run.wait() == 0
    assert not run.run.attempts_ledger.exists()


def test_address_file_of_an_earlier_start_is_removed(supervise, tmp_path):
    attempt = RunDir(tmp_path).attempt(1)
    attempt.folder.mkdir(parents=True)
    attempt.address("train").parent.mkdir(parents=True)
    attempt.address("train").write_text("ghosts")
    run = supervise("train")
    run.wait()
    assert not attempt.address("train").exists()


def test_zombie_has_no_start_time():
    assert start_time(os.getpid()) is not None
    child = subprocess.Popen(["true"])
    time.sleep(0.2)
    assert start_time(child.pid) is None, "a zombie is gone"
    child.wait()
    assert json.dumps(start_time(child.pid)) == "null"


def test_ranks_end_with_the_directory_of_their_run(supervise, tmp_path):
    """A directory that was removed, moved or replaced; all at the same time, since they mostly wait."""
    started = {}
    for how in ("removed", "moved", "replaced"):
        root = tmp_path / how / "mine"
        root.mkdir(parents=True)
        (root / "resolved.yaml").touch()
        run = supervise("stubborn", root=root)
        started[root] = run, run.wait_for_ranks()
    shutil.rmtree(tmp_path / "removed" / "mine")
    (tmp_path / "moved" / "mine").rename(tmp_path / "elsewhere")
    replaced = tmp_path / "replaced" / "mine"
    replaced.rename(tmp_path / "also elsewhere")
    replaced.mkdir()
    (replaced / "resolved.yaml").touch()
    for root, (run, pids) in started.items():
        assert run.wait() == 1
        assert [pid for pid in pids if start_time(pid) is not None] == []
        said = root.with_name("mine.log").read_text()
        assert f"{root}: the directory of this run was removed, moved or replaced while it ran" in said
        assert [path.name for path in root.iterdir()] == ["resolved.yaml"] if root == replaced else not root.exists()
