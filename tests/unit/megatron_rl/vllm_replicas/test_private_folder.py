"""Folders for vLLM's sockets: paths that the kernel takes, and nothing left of owners that were killed."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megatron_rl.generate.vllm.private_folder import SOCKET_NAME_BYTES, private_folder
from megatron_rl.recipe.errors import ConfigurationError

OWNER = """
import sys
from megatron_rl.generate.vllm.private_folder import private_folder
with private_folder() as folder:
    (folder / "socket").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """TMPDIR, with a path that is short enough on every machine that runs this test."""
    folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    set_temporary(folder, monkeypatch)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    return folder


def set_temporary(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_a_folder_is_in_tmpdir_for_this_user_alone_and_ends_with_its_use(temporary: Path) -> None:
    with private_folder() as folder:
        assert folder.parent == temporary
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


def test_with_a_long_tmpdir_sockets_are_in_the_runtime_directory_or_tmp(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_temporary(temporary / ("long" * 15), monkeypatch)
    with private_folder() as folder:
        assert folder.parent == Path("/tmp")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / ("s" * SOCKET_NAME_BYTES)))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(temporary))
    with private_folder() as folder, private_folder(for_sockets=False) as large:
        assert folder.parent == temporary
        assert large.parent == temporary / ("long" * 15)


def test_without_a_short_folder_the_error_names_tmpdir(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_temporary(temporary / ("long" * 15), monkeypatch)
    monkeypatch.setattr(os, "access", lambda path, mode: path != "/tmp")
    with pytest.raises(ConfigurationError, match=r"TMPDIR is /tmp/.*longlong.*set TMPDIR to a folder with a shorter"):
        private_folder().__enter__()


def test_folders_of_killed_owners_are_removed_and_those_of_living_ones_stay(temporary: Path) -> None:
    owners = [
        subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    folders = []
    for owner in owners:
        assert owner.stdout is not None
        folders.append(Path(owner.stdout.readline().strip()))
    owners[0].send_signal(signal.SIGKILL)
    owners[0].wait()
    foreign = temporary / folders[0].name.rpartition("-")[0] / "-open"
    foreign.mkdir(parents=True, mode=0o755)
    with private_folder() as folder:
        assert {*temporary.iterdir()} == {folder, folders[1], foreign.parent}
    owners[1].communicate("")
    assert {*temporary.iterdir()} == {foreign.parent}
