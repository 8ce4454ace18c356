"""mrl status --watch prints what happens in a run until it has ended."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_helpers import begin, end, make_run

from launcher.host.process.lock import RunLock
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import append, write
from megatron_rl.contract.run_records import Done


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RunDir, RunLock, subprocess.Popen[bytes]]:
    """A run that looks as if its supervisor lived, since this process holds its lock, and its watcher."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("MRL_CLUSTERS", "")
    run = make_run(tmp_path / "r", "training.steps=9")
    begin(run, 1, at=time.time())
    lock = RunLock(run.lock, "a test")
    append(run.metrics, MetricsLine(1, {"mean_reward": 0.25, "time/step_s": 1.0}))
    words = [str(Path(sys.executable).with_name("mrl")), "status", "--watch", str(run.root)]
    watcher = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    read_until(watcher, rb"step 1/9  reward 0\.250")
    return run, lock, watcher


def read_until(watcher: subprocess.Popen[bytes], pattern: bytes, limit_s: float = 60.0) -> None:
    assert watcher.stdout is not None
    said, give_up = b"", time.monotonic() + limit_s
    while not re.search(pattern, said):
        assert time.monotonic() < give_up, said.decode(errors="replace")
        if select.select([watcher.stdout], [], [], 0.1)[0]:
            said += os.read(watcher.stdout.fileno(), 65536)


def test_a_watched_run_is_printed_until_it_has_ended(watched) -> None:
    run, lock, watcher = watched
    end(run, 1, "finished", at=time.time(), step=9)
    write(run.done, Done(1, 9, time.time()))
    lock.release()
    read_until(watcher, rb"finished: 1 steps")
    assert watcher.wait(60) == 0


def test_ctrl_c_leaves_the_run_alone(watched) -> None:
    run, lock, watcher = watched
    watcher.send_signal(signal.SIGINT)
    read_until(watcher, rb"stopped watching; r continues")
    assert watcher.wait(60) == 130
    assert not run.attempt(1).drain.exists()
    lock.release()
