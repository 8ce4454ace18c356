"""A directory is replaced safely: killing the writer at any moment loses nothing good."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.checkpoint.hf.staging import staged


def content(folder: Path) -> str | None:
    return (folder / "content").read_text() if folder.exists() else None


def convert(target: Path, text: str) -> None:
    with staged(target, 0, replace=True) as folder:
        (folder / "content").write_text(text)


def killed_at(step: int, target: Path) -> bool:
    """Whether a child that replaces `target` reached this operation of the file system, before which it is killed."""
    child = os.fork()
    if child == 0:
        number = itertools.count()

        def watched(act: Callable[..., Any]) -> Callable[..., Any]:
            def die_or_act(*given: Any, **named: Any) -> Any:
                if next(number) == step:
                    os._exit(9)
                return act(*given, **named)

            return die_or_act

        with pytest.MonkeyPatch.context() as patch:
            for owner, name in ((Path, "mkdir"), (Path, "rename"), (os, "fsync"), (shutil, "rmtree")):
                patch.setattr(owner, name, watched(getattr(owner, name)))
            convert(target, "new")
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def test_a_kill_at_any_step_leaves_the_old_or_the_new_directory(tmp_path: Path) -> None:
    """Between two renames the old one is beside it, under a name that says so."""
    target, found = tmp_path / "dst", []
    for step in itertools.count():
        convert(target, "old")
        if not killed_at(step, target):
            break
        (old,) = [*tmp_path.glob(".dst.*.old.tmp")] or [target]
        found.append("old" if content(target) is None else content(target))
        assert content(target) is not None or content(old) == "old", step
        for left in {*tmp_path.iterdir()} - {target}:
            shutil.rmtree(left)
    assert {*found} == {"old", "new"} and found == sorted(found, reverse=True)
