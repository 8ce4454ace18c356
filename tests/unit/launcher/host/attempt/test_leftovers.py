"""Processes of a killed batch script hold its lock for some seconds. Only starts of the same run may wait for them."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launcher.host.attempt.job_context import JobContext, JobRefused
from launcher.host.attempt.own import own
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
