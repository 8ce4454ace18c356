"""An image that takes long to import does not keep a job from leaving, nor stays behind."""

from __future__ import annotations

import os
import subprocess

import pytest
from lab import wait_until
from login import SECONDS, Login
from together import Together

DEMO = ("demo", "--cluster", "pods", "job.nodes=1", "job.gpus_per_node=2")
DIGEST = "sha256:" + "0" * 64
SOON = 30.0

together = Together()


class Import:
    """A run whose import has begun."""

    def __init__(self, login: Login, number: int) -> None:
        self._words = f"sleep {1000 + number}.{os.getpid()}"  # by which the fake enroot can be found
        login.program("enroot", f"[[ $1 != digest ]] || {{ echo {DIGEST}; exit; }}\nexec {self._words}")
        login.profiles["pods"] |= {"prolog": [f'PATH={login.home}/bin:"$PATH"'], "health_check": False}
        login.profiles["pods"]["container"]["image"] = "nvcr.io#nvidia/pytorch:25.06-py3"
        self.run = login.submit(*DEMO)
        wait_until("the import has begun", self.goes_on, SECONDS)

    def goes_on(self) -> bool:
        return subprocess.run(["pgrep", "-f", f"^{self._words}$"], stdout=subprocess.DEVNULL).returncode == 0

    def wait_for_end(self) -> None:
        wait_until("the first attempt has ended", self.run.ends, SOON)
        wait_until("the import has ended", lambda: not self.goes_on(), SOON)


@pytest.mark.slow
@together
def test_drain_stops_an_image_import_and_the_next_start_repeats_it(login: Login) -> None:
    imported = Import(login, 1)
    run = imported.run
    login.lab.run("scancel", "--signal=USR1", "--batch", run.job)
    imported.wait_for_end()
    assert run.ends() == [("drained", "signal")]
    wait_until("the next import has begun", lambda: imported.goes_on() or run.state() == "FAILED", SECONDS)
    assert run.state() == "RUNNING", run.log()
    assert not run.seen()


@pytest.mark.slow
@together
def test_mrl_cancel_drain_stops_an_image_import(login: Login) -> None:
    imported = Import(login, 2)
    login.call("mrl", "cancel", "--drain", imported.run.dir.root)
    imported.wait_for_end()
    assert imported.run.ends() == [("stopped", "cancelled")]
    assert imported.run.wait() == "COMPLETED"
