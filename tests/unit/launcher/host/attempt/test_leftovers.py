"""Processes of a killed batch script hold its lock for some seconds, and those on a lost node for longer. Only starts
of the same run may wait for them, and come back later."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launcher.host.attempt import own as own_module
from launcher.host.attempt import slurm_run
from launcher.host.attempt.job_context import JobContext, JobRefused
from launcher.host.attempt.own import own
from launcher.host.attempt.slurm_run import JobSettings, run_job
from launcher.host.process.signals import Signals
from launcher.host.slurm import orders, queries
from megatron_rl.contract.attempt_records import AttemptEnd, AttemptStart
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import append, write
from megatron_rl.contract.run_records import Owner


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that job 8 was submitted for."""
    found = RunDir(tmp_path)
    found.resolved.touch()
    write(found.job, Owner("8", "lab", 0.0))
    return found


def start(run: RunDir) -> None:
    """Job 8 starts, and takes the run."""
    own(JobContext(run, "lab", "8", ["n1"])).release()


@contextmanager
def locked(run: RunDir, seconds: float) -> Iterator[None]:
    """Something holds the lock for so long."""
    descriptor = os.open(run.job_lock, os.O_CREAT | os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    release = threading.Timer(seconds, lambda: fcntl.flock(descriptor, fcntl.LOCK_UN))
    release.start()
    yield
    release.cancel()
    os.close(descriptor)


def begin(run: RunDir, job_id: str) -> None:
    """An attempt of that job, which came to its end."""
    append(run.attempts_ledger, AttemptStart(1, 0.0, job_id=job_id))
    append(run.attempts_ledger, AttemptEnd(1, 1.0, "stopped", job_id=job_id, then="over"))


def test_a_resumed_run_waits_for_what_the_job_before_it_left_behind(run: RunDir) -> None:
    begin(run, "7")
    with locked(run, 0.7):
        start(run)


def test_a_second_script_in_the_allocation_of_the_first_is_refused_at_once(run: RunDir) -> None:
    begin(run, "8")
    with locked(run, 30.0), pytest.raises(JobRefused, match="belongs to job 8"):
        start(run)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_without_locks_job_json_alone_tells_the_owner(run: RunDir, monkeypatch, capsys, number) -> None:
    def refuse(descriptor: int, how: int) -> None:
        raise OSError(number, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    start(run)
    assert "only job.json identifies the owner" in capsys.readouterr().out


class TestLostNode:
    """Slurm has lost the batch host of the run, whose processes go on, and starts the job again elsewhere."""

    @pytest.fixture
    def start(self, run: RunDir, monkeypatch: pytest.MonkeyPatch):
        """Start a job, and return its exit code and the orders that Slurm got."""
        monkeypatch.setattr(own_module, "LEFTOVERS_S", 0.1)
        monkeypatch.setenv("XDG_STATE_HOME", str(run.root / "state"))
        append(run.attempts_ledger, AttemptStart(1, 0.0, host="n1", job_id="8", nodes=["n1"]))
        job = {"BatchFlag": "1", "Requeue": "1", "JobState": "RUNNING"}
        told: list[str] = []
        monkeypatch.setattr(queries, "show_job", lambda job_id: dict(job))
        monkeypatch.setattr(orders, "requeue", lambda job_id: told.append(f"requeue {job_id}"))
        monkeypatch.setattr(orders, "exclude", lambda job_id, hosts: told.append(f"exclude {hosts}"))

        def postpone(job_id: str, until: float) -> None:
            told.append(f"postpone {job_id} by {(until - time.time()) / 60:.0f} min")

        def submit(job_id: str, script: str, *given: object) -> str:
            told.append(f"submit {script} after {job_id}")
            return "9"

        monkeypatch.setattr(orders, "postpone", postpone)
        monkeypatch.setattr(orders, "submit_successor", submit)
        monkeypatch.setattr(queries, "waiting_for", lambda job_id, name: [])

        def start(job_id: str = "8", restarts: int = 1, succeeds: str | None = None, **facts: str):
            job.update(facts)
            told.clear()
            settings = JobSettings("spool", 60.0, 30.0, False, slurm_run.Checks())
            context = JobContext(run, "lab", job_id, ["n2"], restarts=restarts, succeeds=succeeds, batch_host="n2")
            return run_job(context, settings, Signals(())), list(told)

        return start

    def test_the_job_comes_back_later_any_number_of_times(self, run, start, capsys):
        before = run.attempts_ledger.read_text()
        with locked(run, 30.0):
            for restarts in (1, 2, 9):
                assert start(restarts=restarts) == (75, ["requeue 8", "postpone 8 by 15 min"])
        told = capsys.readouterr().err
        assert f"processes of an earlier start on n1 still hold {run.job_lock}" in told
        assert "nothing is lost: the job comes back in 15 min" in told
        assert run.attempts_ledger.read_text() == before, "the attempt may still be running"

    def test_a_successor_of_the_job_does_too(self, run, start):
        write(run.job, Owner("9", "lab", 0.0, succeeds="8"))
        with locked(run, 30.0):
            assert start("9", 0, succeeds="8") == (75, ["requeue 9", "postpone 9 by 15 min"])

    def test_a_job_that_slurm_does_not_requeue_gets_a_successor(self, run, start):
        with locked(run, 30.0):
            assert start(Requeue="0") == (75, ["submit spool after 8"])

    def test_where_the_job_cannot_come_back_the_log_says_what_to_do(self, run, start, capsys):
        with locked(run, 30.0):
            assert start(BatchFlag="0") == (75, [])
        assert "nothing is lost, mrl resume continues" in capsys.readouterr().err

    def test_a_job_whose_run_now_belongs_to_another_one_is_over(self, run, start, capsys):
        write(run.job, Owner("12", "lab", 0.0))
        with locked(run, 30.0):
            assert start() == (2, [])
            assert start("9", 0, succeeds="8") == (2, [])
        assert "belongs to job 12, whose script is running" in capsys.readouterr().err

    def test_a_second_script_in_the_restarted_job_does_not_send_the_first_one_back(self, run, start, capsys):
        append(run.attempts_ledger, AttemptStart(2, 0.0, host="n2", job_id="8", restart=1, nodes=["n2"]))
        with locked(run, 30.0):
            assert start() == (2, [])
        assert "belongs to job 8, whose script is running" in capsys.readouterr().err
