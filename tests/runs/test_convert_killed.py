"""A directory is replaced safely: killing the writer at any moment loses nothing good, and no process deletes a
directory that another one still writes."""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.checkpoint.hf import staging
from megatron_rl.checkpoint.hf.staging import clean_up, staged
from megatron_rl.recipe.errors import ConfigurationError


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "dst"


def content(folder: Path) -> str | None:
    return (folder / "content").read_text() if folder.exists() else None


def convert(target: Path, text: str, *, replace: bool = False) -> None:
    with staged(target, 0, replace=replace) as folder:
        (folder / "content").write_text(text)


def observed(patch: pytest.MonkeyPatch, before: Callable[[int], None]) -> None:
    """Call `before` with its number before each file system operation of this process."""
    number, looking = itertools.count(), False

    def watched(act: Any) -> Any:
        def step(*given: Any, **named: Any) -> Any:
            nonlocal looking
            if not looking:  # operations of libraries at a fork do not count
                looking = True
                before(next(number))
                looking = False
            return act(*given, **named)

        return step

    patch.setattr(Path, "mkdir", watched(Path.mkdir))
    patch.setattr(Path, "rename", watched(Path.rename))
    patch.setattr(Path, "unlink", watched(Path.unlink))
    patch.setattr(fcntl, "flock", watched(fcntl.flock))
    patch.setattr(os, "write", watched(os.write))
    patch.setattr(os, "fsync", watched(os.fsync))
    patch.setattr(shutil, "rmtree", watched(shutil.rmtree))


def killed_at(step: int, target: Path) -> bool:
    """Whether a child that replaces `target` reached this step, before which it is killed."""
    child = os.fork()
    if child == 0:

        def die(number: int) -> None:
            if number == step:
                os._exit(9)

        with pytest.MonkeyPatch.context() as patch:
            observed(patch, die)
            convert(target, "new", replace=True)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def test_kill_at_any_step_leaves_the_old_or_the_new_directory_and_no_weights_beside_it(target: Path) -> None:
    found = []
    for step in itertools.count():
        convert(target, "old", replace=True)
        if not killed_at(step, target):
            break
        clean_up(target)
        found.append(content(target))
        for left in {*target.parent.iterdir()} - {target}:  # killed before it had recorded its owner
            assert {path.name: path.stat().st_size for path in left.iterdir()} in ({}, {staging.WRITER: 0}), step
            shutil.rmtree(left)
        assert [path.name for path in target.iterdir()] == ["content"], step
    assert set(found) == {"old", "new"}
    assert found == sorted(found, reverse=True), (
        "the old directory must be found up to one step, and the new one after it"
    )


def test_next_command_restores_the_old_directory_before_it_acts(target: Path) -> None:
    convert(target, "old")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "_put_in_place", lambda folder, target: target.rename(staging._replaced_by(folder)))
        patch.setattr(staging, "_finish", lambda target, old: None)
        convert(target, "new", replace=True)
    assert content(target) is None
    with pytest.raises(ConfigurationError, match="dst exists: give another path"):
        convert(target, "newest")
    assert content(target) == "old"
    convert(target, "newest", replace=True)
    assert content(target) == "newest"


def test_directory_created_meanwhile_is_not_replaced_by_the_old_one(target: Path) -> None:
    old, folder = target.with_name(".dst.01234567.old.tmp"), target.with_name(".dst.01234567.tmp")
    for path, text in ((old, "old"), (folder, "new"), (target, "somebody's")):
        path.mkdir()
        (path / "content").write_text(text)
    (folder / staging.WRITER).write_bytes(staging._host())
    clean_up(target)
    assert [content(path) for path in (old, folder, target)] == ["old", "new", "somebody's"]


def test_no_other_process_deletes_or_restores_anything_while_it_is_written(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process of this host cleans up before each step, also before the writer has locked its directory."""
    convert(target, "old")
    steps = []

    def clean_up_meanwhile(number: int) -> None:
        steps.append(number)
        child = os.fork()
        if child == 0:
            monkeypatch.undo()
            clean_up(target)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    observed(monkeypatch, clean_up_meanwhile)
    convert(target, "new", replace=True)
    monkeypatch.undo()
    assert content(target) == "new"
    assert [path.name for path in target.parent.iterdir()] == ["dst"]
    assert len(steps) > 8
