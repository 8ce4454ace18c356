"""What a killed batch script leaves behind holds its lock for some seconds. Who may wait for that, and who must not."""

from __future__ import annotations

import argparse
import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launcher.host.attempt import begin as begin_module
from launcher.host.attempt.context import Here, Refused
from launcher.host.record import ledger
from megatron_rl.contract.paths import RunDir
from megatron_rl.run_dir import write_json


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that job 8 was submitted for."""
    found = RunDir(tmp_path)
    write_json(found.job, {"job_id": "8"})
    return found


def own(run: RunDir, restarts: int = 0) -> int:
    """Job 8 starts."""
    here = Here({"MRL_RUN_DIR": str(run.root), "SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": str(restarts)})
    descriptor = os.open(run.job_lock, os.O_CREAT | os.O_RDWR)
    try:
        return begin_module.own(here, argparse.Namespace(lock=descriptor))
    finally:
        os.close(descriptor)


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
    ledger.record(run, 1, "start", 0.0, job_id=job_id)
    ledger.record(run, 1, "end", 1.0, job_id=job_id, outcome="stopped", then="over")


def test_a_resumed_run_waits_for_what_the_job_before_it_left_behind(run: RunDir) -> None:
    begin(run, "7")
    with locked(run, 0.7):
        assert own(run) == 0


def test_a_second_script_in_the_allocation_of_the_first_is_refused_at_once(run: RunDir) -> None:
    begin(run, "8")
    with locked(run, 30.0), pytest.raises(Refused, match="belongs to job 8"):
        own(run)
