"""Folders for vLLM's sockets: this user's, with paths that the kernel takes."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from pathlib import Path

import pytest

from megatron_rl.generate.vllm.private_folder import SOCKET_NAME_BYTES, private_folder
from megatron_rl.recipe.errors import ConfigurationError


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
