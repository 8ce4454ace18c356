"""A command has ended, or been ended with all that it started, when its limit is over."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from launcher.host.process import limited
from launcher.host.process.limited import end_session, run_limited
from launcher.host.process.processes import start_time


def test_what_a_command_says_is_returned():
    done = run_limited(["sh", "-c", "echo out; echo $NAME >&2; exit 3"], 30.0, {"NAME": "err"})
    assert (done.returncode, done.stdout, done.stderr) == (3, b"out\n", b"err\n")


def test_a_command_outlives_what_ends_the_job_that_it_is_part_of():
    """Like `scontrol requeue`: all processes of the job get SIGTERM before Slurm has answered."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    done = run_limited(["sh", "-c", "for name in TERM USR1 USR2 HUP; do kill -$name $$; done; echo answer"], 30.0)
    assert (done.returncode, done.stdout) == (0, b"answer\n")
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_what_a_late_command_has_started_ends_with_it(tmp_path: Path):
    with pytest.raises(subprocess.TimeoutExpired):
        run_limited(["sh", "-c", f"sleep 3600 & echo $! > {tmp_path}/child; wait"], 0.3)
    child, give_up = int((tmp_path / "child").read_text()), time.monotonic() + 60
    while start_time(child) is not None:
        assert time.monotonic() < give_up, "it is still there"
        time.sleep(0.01)


def test_what_nothing_can_end_is_left_behind(monkeypatch):
    """Such as a process that waits in the kernel for a device: here one that no signal is sent to."""
    monkeypatch.setattr(limited, "END_S", 0.1)
    monkeypatch.setattr(limited.os, "killpg", lambda *given: None)
    process = subprocess.Popen(["sleep", "60"], stdout=subprocess.PIPE, start_new_session=True)
    try:
        end_session(process)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_command_that_cannot_be_started_raises():
    with pytest.raises(FileNotFoundError):
        run_limited(["/no/such/command"], 1.0)
