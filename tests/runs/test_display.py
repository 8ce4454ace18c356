"""A run does not depend on the abilities of its terminal, nor on a reader of its output."""

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
    """Pseudo-terminal that is read to the end, or closed after its first bytes."""

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
            except OSError:  # no process has it open for writing
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


def test_run_finishes_on_any_terminal(tmp_path: Path) -> None:
    """All kinds run at the same time, since they mostly wait."""
    cases = {
        "ascii": ({"PYTHONIOENCODING": "ascii"}, (40, 120), False),
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


def test_run_finishes_without_a_reader_or_space_for_output(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    full = os.open("/dev/full", os.O_WRONLY)
    runs = {"broken": start(tmp_path / "broken", writing, writing), "full": start(tmp_path / "full", full, full)}
    for name, process in runs.items():
        assert (process.wait(LIMIT_S), RunDir(tmp_path / name).done.exists()) == (0, True), name


def test_run_finishes_with_closed_streams(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SUBMIT, str(tmp_path / "run")]
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path / "state"), "MRL_CLUSTERS": ""}
    shell = ["sh", "-c", 'exec 1>&- 2>&-; exec "$@"', "sh", *command]
    assert subprocess.run(shell, env=environment, timeout=LIMIT_S, check=False).returncode == 0
    assert RunDir(tmp_path / "run").done.exists()
