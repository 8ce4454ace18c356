"""What is written for a checkpoint or a converted model is on the disk, and not only on its way there, before anybody
can take it for one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.checkpoint.hf.staging import WRITER, staged
from megatron_rl.checkpoint.publish import hash_file
from megatron_rl.checkpoint.shards import Abandoned, RecordedFile

Synced = list[tuple[int, int]]
"""Inode and size of what was made durable, in that order."""


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


def test_a_shard_is_durable_as_a_whole_once_it_is_closed(tmp_path: Path, synced: Synced) -> None:
    with RecordedFile(tmp_path / "shard", lambda: None) as file:
        file.write(b"x" * 1000)
        file.save({"step": 3})
        assert synced == []
    there = (tmp_path / "shard").stat()
    assert synced == [(there.st_ino, there.st_size)]
    assert file.record == hash_file(tmp_path / "shard")


def test_one_that_is_given_up_is_not_waited_for(tmp_path: Path, synced: Synced) -> None:
    with pytest.raises(Abandoned), RecordedFile(tmp_path / "shard", lambda: None) as file:
        file.write(b"x" * 1000)
        raise Abandoned
    assert synced == []


def test_a_new_directory_is_durable_with_all_that_is_in_it_before_it_takes_its_place(
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
    made = [target, *(path for path in target.rglob("*") if path.name != WRITER)]
    assert {path.stat().st_ino for path in made} <= {*before}
    assert tmp_path.stat().st_ino in [inode for inode, _ in synced[len(before) :]], "and then its own name"
