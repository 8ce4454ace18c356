"""An image that takes long to import does not keep a job from leaving, nor stays behind."""

from __future__ import annotations

import os
import subprocess

import pytest
from lab import wait_until
from login import SECONDS, Login, Run

DEMO = ("demo", "--cluster", "pods", "job.nodes=1", "job.gpus_per_node=2")
DIGEST = "sha256:" + "0" * 64
SOON = 30.0
IMPORT = f"sleep 1000.{os.getpid()}"
"""Words by which the fake enroot can be found."""


@pytest.fixture
def run(login: Login) -> Run:
    """A run whose import has begun."""
    login.program("enroot", f"[[ $1 != digest ]] || {{ echo {DIGEST}; exit; }}\nexec {IMPORT}")
    login.profiles["pods"] |= {"prolog": [f'PATH={login.home}/bin:"$PATH"'], "health_check": False}
    login.profiles["pods"]["container"]["image"] = "nvcr.io#nvidia/pytorch:25.06-py3"
    run = login.submit(*DEMO)
    wait_until("the import has begun", imports, SECONDS)
    return run


def imports() -> bool:
    return subprocess.run(["pgrep", "-f", f"^{IMPORT}$"], stdout=subprocess.DEVNULL).returncode == 0


def test_a_drain_stops_it_and_the_next_start_begins_again(login: Login, run: Run) -> None:
    login.lab.run("scancel", "--signal=USR1", "--batch", run.job)
    wait_until("the first attempt has ended", run.ends, SOON)
    wait_until("the import has ended", lambda: not imports(), SOON)
    assert run.ends() == [("drained", "signal")]
    wait_until("the next import has begun", lambda: imports() or run.state() == "FAILED", SECONDS)
    assert run.state() == "RUNNING", run.log()
    assert not run.seen()


def test_mrl_cancel_drain_stops_it(login: Login, run: Run) -> None:
    login.call("mrl", "cancel", "--drain", run.dir.root)
    wait_until("the first attempt has ended", run.ends, SOON)
    wait_until("the import has ended", lambda: not imports(), SOON)
    assert run.ends() == [("stopped", "cancelled")]
    assert run.wait() == "COMPLETED"
