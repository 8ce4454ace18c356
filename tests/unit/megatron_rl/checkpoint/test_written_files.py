"""Files of a checkpoint or a converted model are durable on disk before they get their final name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.checkpoint.hf.staging import staged
from megatron_rl.checkpoint.shards import Abandoned, RecordedFile
from megatron_rl.contract.manifest import hash_file

Synced = list[tuple[int, int]]
"""Inode and size of each fsynced file, in the order of the calls."""


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> Synced:
    seen: Synced = []
    real: Callable[[int], None] = os.fsync

    def fsync(descriptor: int) -> None:
        found = os.fstat(descriptor)
        seen.append((found.st_ino, found.st_size))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return seen


def test_a_shard_is_durable_once_it_is_closed(tmp_path: Path, synced: Synced) -> None:
    with RecordedFile(tmp_path / "shard", lambda: None) as file:
        file.write(b"x" * 1000)
        file.save({"step": 3})
        assert synced == []
    there = (tmp_path / "shard").stat()
    assert synced == [(there.st_ino, there.st_size)]
    assert file.record == hash_file(tmp_path / "shard")


def test_an_abandoned_shard_is_not_fsynced(tmp_path: Path, synced: Synced) -> None:
    with pytest.raises(Abandoned), RecordedFile(tmp_path / "shard", lambda: None) as file:
        file.write(b"x" * 1000)
        raise Abandoned
    assert synced == []


def test_a_new_directory_is_durable_with_its_files_before_it_is_renamed(
    tmp_path: Path, synced: Synced, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"
    before: list[int] = []
    rename = Path.rename

    def renamed(path: Path, to: Path) -> Path:
        if to == target:
            before.extend(inode for inode, _ in synced)
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", renamed)
    with staged(target, 0, replace=False) as folder:
        (folder / "templates").mkdir()
        (folder / "templates" / "tool.jinja").write_text("{{ x }}")
        (folder / "model.safetensors").write_bytes(b"weights")
        assert not target.exists()
    made = [target, *target.rglob("*")]
    assert {path.stat().st_ino for path in made} <= {*before}
    assert tmp_path.stat().st_ino in [inode for inode, _ in synced[len(before) :]], "and then its own name"
