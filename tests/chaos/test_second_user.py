"""The stranger of the chaos finds each door that a process leaves open, and none in a closed run. Needs root."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from second_user import attack

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")]

OPEN = """
import http.server, sys
server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
print(flush=True)
server.serve_forever()
"""
CARELESS = """
import os, pickle, socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(flush=True)
while True:
    here, _ = listener.accept()
    here.settimeout(2)
    try:
        pickle.loads(here.recv(65536))
    except Exception:
        pass
    here.close()
"""
SHY = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(flush=True)
while True:
    listener.accept()[0].close()
"""


@pytest.fixture
def run() -> Iterator[Path]:
    """A directory of a run where other users may enter the one above it."""
    with tempfile.TemporaryDirectory(prefix="mrl-") as folder:
        Path(folder).chmod(0o755)
        run = Path(folder, "run")
        run.mkdir(mode=0o700)
        (run / "token").write_text("secret-of-the-run\n")
        yield run


def found(run: Path, program: str, *words: str, cwd: Path | None = None) -> str:
    """Return what the stranger achieves while a program of the run listens."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words],
        env={**os.environ, "MRL_RUN_DIR": str(run)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=cwd or run,
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        return "\n".join(attack(run))
    finally:
        process.kill()
        process.wait()


def test_closed_run_gives_nothing_away(run: Path) -> None:
    assert found(run, SHY) == ""


def test_server_without_a_token_is_found(run: Path, tmp_path: Path) -> None:
    assert "GET / with token None" in found(run, OPEN, cwd=tmp_path)


def test_listener_that_unpickles_is_found(run: Path) -> None:
    assert found(run, CARELESS) == "a pickle was loaded"


def test_open_directory_and_a_token_among_arguments_are_found(run: Path) -> None:
    run.chmod(0o777)
    said = found(run, SHY, "--token=secret-of-the-run")
    for words in (f"{run} was listed", f"{run} was written", "cmdline shows the token"):
        assert words in said
