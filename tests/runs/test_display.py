"""A run does not depend on what its terminal can show, nor on whether anybody reads what is printed."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest
from run_helpers import fake_ranks

from megatron_rl.contract.paths import RunDir

LIMIT_S = 120.0
SUBMIT = f"""{fake_ranks("train")}
import sys
from launcher.cli.entry import mrl_submit
sys.argv = ["mrl-submit", "demo", "--run-dir", sys.argv[1]]
mrl_submit()
"""


class Terminal:
    """One that is read to the end, or closed after its first bytes."""

    def __init__(self, size: tuple[int, int], closes: bool) -> None:
        self._ours, self.theirs = pty.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        self.said = b""
        self._closes = closes
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._ours, 4096)
            except OSError:  # nobody writes any more
                data = b""
            self.said += data
            if not data or self._closes:
                os.close(self._ours)
                return


def start(run: Path, stdout: int, stderr: int, **variables: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {"XDG_STATE_HOME": str(run.parent / "state"), "MRL_CLUSTERS": "", "TERM": "xterm"}
    environment |= {"FAKE_STEPS": "30"} | variables
    command = [sys.executable, "-c", SUBMIT, str(run)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environment)


def test_no_terminal_ends_a_run(tmp_path: Path) -> None:
    """All at the same time: most of it is waiting."""
    cases = {
        "ascii": ({"PYTHONIOENCODING": "ascii"}, (40, 120), False),
        "latin-1": ({"PYTHONIOENCODING": "iso8859-1"}, (40, 120), False),
        "dumb": ({"TERM": "dumb"}, (40, 120), False),
        "without-a-size": ({}, (0, 0), False),
        "narrow": ({}, (2, 3), False),
        "closed": ({}, (40, 120), True),
    }
    runs = {}
    for name, (variables, size, closes) in cases.items():
        terminal = Terminal(size, closes)
        runs[name] = terminal, start(tmp_path / name, terminal.theirs, terminal.theirs, **variables)
        os.close(terminal.theirs)
    for name, (terminal, process) in runs.items():
        code = process.wait(LIMIT_S)
        terminal.reader.join(LIMIT_S)
        assert (code, RunDir(tmp_path / name).done.exists()) == (0, True), (
            f"{name}: {terminal.said.decode(errors='replace')}"
        )
        assert b"Traceback" not in terminal.said, name
        assert b"display failed" not in terminal.said, name
        if name != "closed":
            assert b"finished" in terminal.said, name


def test_no_reader_and_no_room_ends_a_run(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    full = os.open("/dev/full", os.O_WRONLY)
    runs = {"broken": start(tmp_path / "broken", writing, writing), "full": start(tmp_path / "full", full, full)}
    for name, process in runs.items():
        assert (process.wait(LIMIT_S), RunDir(tmp_path / name).done.exists()) == (0, True), name


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_no_closed_stream_ends_a_run(tmp_path: Path, stream: str) -> None:
    number = {"stdout": 1, "stderr": 2}[stream]
    command = [sys.executable, "-c", SUBMIT, str(tmp_path / "run")]
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path / "state"), "MRL_CLUSTERS": ""}
    shell = ["sh", "-c", f'exec {number}>&-; exec "$@"', "sh", *command]
    assert subprocess.run(shell, env=environment, timeout=LIMIT_S, check=False).returncode == 0
    assert RunDir(tmp_path / "run").done.exists()
