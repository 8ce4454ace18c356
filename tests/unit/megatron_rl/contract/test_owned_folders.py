"""Temporary folders with owners: nothing is left of those that were killed, and those of living ones stay."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megatron_rl.contract.owned_folders import NOTE, owned_folder, prefix_of, remove_ownerless

OWNER = """
import sys
from pathlib import Path
from megatron_rl.contract.owned_folders import OwnedFolder
folder = OwnedFolder(sys.argv[1], Path(sys.argv[2]))
(folder.path / "socket").touch()
print(folder.path, flush=True)
sys.stdin.read()
folder.close()
"""


def test_folders_of_killed_owners_are_removed_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    owners = [
        subprocess.Popen(
            [sys.executable, "-c", OWNER, kind, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for kind in ("vllm", "programs", "programs")
    ]
    folders = []
    for owner in owners:
        assert owner.stdout is not None
        folders.append(Path(owner.stdout.readline().strip()))
    for killed in owners[:2]:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    foreign = tmp_path / f"{prefix_of('programs')}-open"
    foreign.mkdir(mode=0o755)
    with owned_folder("copies", tmp_path) as folder:
        assert {*tmp_path.iterdir()} == {folder, folders[2], foreign}
    owners[2].communicate("")
    assert {*tmp_path.iterdir()} == {foreign}


def test_a_sweep_alone_removes_them_too(tmp_path: Path) -> None:
    dies = OWNER.replace("sys.stdin.read()", "__import__('os')._exit(9)")
    subprocess.run([sys.executable, "-c", dies, "programs", tmp_path], check=False, stdout=subprocess.DEVNULL)
    assert len([*tmp_path.iterdir()]) == 1
    remove_ownerless(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_is_swept_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept, make = [], tempfile.mkdtemp

    def and_sweep(prefix: str, dir: Path) -> str:
        folder = make(prefix=prefix, dir=dir)
        if not swept:
            swept.append(folder)
            remove_ownerless(tmp_path)
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", and_sweep)
    with owned_folder("programs", tmp_path) as folder:
        assert [*tmp_path.iterdir()] == [folder] != [*map(Path, swept)]


def test_a_folder_that_cannot_be_listed_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: object = ".") -> object:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "scandir", broken)
    remove_ownerless(tmp_path)


def test_damaged_notes_of_shared_memory_go_with_their_folder(tmp_path: Path) -> None:
    with owned_folder("vllm", tmp_path) as folder:
        (folder / NOTE).write_text("[1]")
    assert not folder.exists()
