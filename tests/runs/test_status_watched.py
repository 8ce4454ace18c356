"""mrl status --watch: a view that redraws itself on a terminal, a block for each change elsewhere."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import commands
import pytest
from run_helpers import begin, end, make_run

from launcher.cli.show import live
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.records import append, write
from megatron_rl.contract.run_records import Done

WATCH = """
import sys
from launcher.cli.show import live
live.REFRESH_S = 0.1
live.LEAST_PAUSE = 1.0
from launcher.cli.entry import mrl
sys.argv = ["mrl", "status", "--watch", *sys.argv[1:]]
mrl()
"""


class Supervising:
    """A run that looks as if its supervisor lived: this process holds its lock."""

    def __init__(self, root: Path) -> None:
        self.run = make_run(root, "training.steps=9")
        begin(self.run, 1, at=time.time())
        from launcher.host.process.lock import RunLock

        self._lock = RunLock(self.run.lock, "a test")

    def step(self, number: int, reward: float) -> None:
        append(self.run.metrics, MetricsLine(number, {"mean_reward": reward, "time/step_s": 1.0}))

    def finish(self) -> None:
        end(self.run, 1, "finished", at=time.time(), step=9)
        write(self.run.done, Done(1, 9, time.time()))
        self._lock.release()


@pytest.fixture
def supervised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Supervising:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("MRL_CLUSTERS", "")
    return Supervising(tmp_path / "r")


def watching(*words: str, **streams: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", WATCH, *words], stderr=subprocess.STDOUT, **streams)


def read_until(descriptor: int, pattern: bytes, limit_s: float = 60.0) -> bytes:
    said, give_up = b"", time.monotonic() + limit_s
    while not re.search(pattern, said):
        assert time.monotonic() < give_up, said.decode(errors="replace")
        if select.select([descriptor], [], [], 0.1)[0]:
            said += os.read(descriptor, 65536)
    return said


def test_a_pipe_gets_a_block_for_each_change_until_the_run_has_ended(supervised: Supervising) -> None:
    supervised.step(1, 0.25)
    process = watching(str(supervised.run.root), stdout=subprocess.PIPE)
    assert process.stdout is not None
    pipe = process.stdout.fileno()
    first = read_until(pipe, b"next|logs")
    assert first.startswith(b"r: running\n")
    time.sleep(1.0)  # nothing changes, so nothing is printed
    assert not select.select([pipe], [], [], 0)[0] or b"r: running" not in os.read(pipe, 65536)
    supervised.step(2, 0.5)
    assert b"step       2 of 9" in read_until(pipe, b"2 of 9")
    supervised.finish()
    rest = process.stdout.read()
    assert b"\n\nr: finished\n" in rest or rest.startswith(b"\nr: finished\n")
    assert process.wait(60) == 0
    assert b"\x1b" not in first + rest


def test_json_is_one_object_a_line(supervised: Supervising) -> None:
    supervised.finish()
    done = commands.run(["mrl", "status", "--watch", "--json", str(supervised.run.root)])
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["state"] == "finished"


@pytest.mark.parametrize("leaves", ["q", "Ctrl-C"])
def test_a_terminal_shows_a_view_that_redraws_itself_and_ends_by_a_key(supervised: Supervising, leaves: str) -> None:
    supervised.step(1, 0.25)
    ours, theirs = pty.openpty()
    process = watching(str(supervised.run.root), stdin=theirs, stdout=theirs, start_new_session=True)
    os.close(theirs)
    said = read_until(ours, rb"q leaves")
    assert b"\x1b[?1049h" in said  # the alternate screen, which leaves the user's own as it was
    assert b"1/9" in said
    supervised.step(2, 0.5)
    again = read_until(ours, rb"2/9")
    assert b"\x1b[2J" not in again  # it is drawn over, not cleared, so that it does not flicker
    if leaves == "q":
        os.write(ours, b"q")
    else:
        process.send_signal(signal.SIGINT)
    last = read_until(ours, rb"\x1b\[\?1049l[\s\S]*logs ")
    assert process.wait(60) == 0
    assert b"r: running" in last[last.index(b"\x1b[?1049l") :]
    assert b"Traceback" not in said + again + last
    assert not supervised.run.attempt(1).drain.exists()


def test_several_runs_are_a_table(tmp_path: Path) -> None:
    from rich.console import Console

    row = {
        "run": "a\x1b[31m",
        "state": "running",
        "phase": "training",
        "step": 5,
        "steps": 10,
        "mean_reward": 0.5,
        "eta_s": 65.0,
        "goodput": {"goodput": 0.87},
        "warnings": [{"name": "truncated"}],
        "waits_for": None,
        "reason": None,
    }
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(live.overview([row, {**row, "run": "b", "warnings": [], "waits_for": "resources", "eta_s": None}]))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert lines[1] == ["a\\x1b[31m", "running", "training", "5/10", "0.500", "1:05", "87%", "truncated"]
    assert lines[2] == ["b", "running", "training", "5/10", "0.500", "87%", "resources"]
