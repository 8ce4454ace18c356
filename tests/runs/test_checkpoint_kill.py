"""SIGKILL at every moment of a save: the checkpoint before it stays good, and none is ever torn.

The moments are the operations of the process on the checkpoints folder, seen by an audit hook: a rank that is to
die at moment n kills itself just before its n-th one. Everything a moment can leave behind is then looked at as the
next start would.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoint_helpers import Ranks, checkpointer, run_ranks, sharded_state

from megatron_rl.checkpoint import shards
from megatron_rl.checkpoint import writer as writer_module
from megatron_rl.checkpoint.publish import clean_up, find_corruption, find_latest, read_manifest
from megatron_rl.contract.paths import RunDir

_TOUCHING = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


class _Moments:
    """Lists what happens to files below `folder`, and dies at moment `fatal` (counted from 1; 0: never)."""

    def __init__(self, folder: Path, fatal: int) -> None:
        self._below = str(folder)
        self._fatal = fatal
        self.seen: list[str] = []
        sys.addaudithook(self._seen)
        write = shards.RecordedFile.write

        def torn(recorded: Any, data: Any) -> int:
            """Half of each write of a shard first, so that a moment lies in the middle of it."""
            half = len(memoryview(data)) // 2
            written = write(recorded, memoryview(data)[:half])
            recorded._file.flush()
            self._moment("write")
            return written + write(recorded, memoryview(data)[half:])

        shards.RecordedFile.write = torn  # type: ignore[method-assign]

    def _seen(self, event: str, args: tuple[Any, ...]) -> None:
        if event in _TOUCHING and str(args[0]).startswith(self._below):
            self._moment(event)

    def _moment(self, event: str) -> None:
        self.seen.append(event)
        if len(self.seen) == self._fatal:
            os.kill(os.getpid(), signal.SIGKILL)


def _two_saves(rank: int, world_size: int, folder: Path, again: int, doomed: int, fatal: int) -> list[str]:
    """Step 20, then a save of step `again` during which rank `doomed` dies. Returns its moments."""
    saver = checkpointer(folder, keep=1)
    saver.save(20, sharded_state(20.0, rank, world_size), {"cursor": 20})
    saver.wait(final=True)
    if fatal:  # the other rank is not to wait long for one that is dead
        writer_module.GRACE_S = 0.5
        saver = checkpointer(folder, keep=1, timeout_s=1)
    moments = _Moments(folder / "checkpoints", fatal if rank == doomed else 0)
    saver.save(again, sharded_state(40.0, rank, world_size), {"cursor": 40})
    saver.wait()
    return moments.seen


def _check_what_the_next_start_finds(folder: Path, steps: set[int]) -> None:
    run_dir = RunDir(folder)
    clean_up(run_dir)
    latest = find_latest(run_dir)
    assert latest.passed_over == ()
    assert latest.step in steps
    manifest = read_manifest(run_dir.checkpoint(latest.step))
    assert find_corruption(run_dir.checkpoint(latest.step), manifest.files) is None
    assert {path.suffix for path in run_dir.checkpoints.iterdir()} == {""}


def _telling(moments: list[str]) -> list[int]:
    """Numbers of all moments but most writes: torch makes dozens of small ones per tensor, all alike."""
    writes = [number for number, event in enumerate(moments, 1) if event == "write"]
    others = [number for number, event in enumerate(moments, 1) if event != "write"]
    assert len(others) >= 5
    return sorted({*others, *writes[:: max(1, len(writes) // 3)]})


@pytest.mark.parametrize("again", [40, 20])
def test_a_lone_rank_may_die_at_any_moment(tmp_path: Path, again: int) -> None:
    """Of a save of a further step, and of one that replaces a checkpoint of the same step."""
    (moments,) = run_ranks(tmp_path, 1, _two_saves, tmp_path / "whole", again, 0, 0)
    found = set()
    # What replacing does otherwise begins with the two renames, near the end.
    for fatal in _telling(moments) if again == 40 else _telling(moments)[-14:]:
        folder = tmp_path / f"killed-{fatal}"
        assert Ranks(tmp_path, 1, _two_saves, folder, again, 0, fatal).join() == [-signal.SIGKILL], fatal
        _check_what_the_next_start_finds(folder, {20, again})
        found.add(read_manifest(RunDir(folder).checkpoint(find_latest(RunDir(folder)).step)).meta["cursor"])
    assert found == {20, 40}  # killed before and after the rename


@pytest.mark.parametrize("doomed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_one_of_two_ranks_may_die_at_any_moment(tmp_path: Path, doomed: int) -> None:
    moments = run_ranks(tmp_path, 2, _two_saves, tmp_path / "whole", 40, doomed, 0)[doomed]
    for fatal in _telling(moments)[1 :: max(1, len(_telling(moments)) // 3)]:
        folder = tmp_path / f"killed-{fatal}"
        assert Ranks(tmp_path, 2, _two_saves, folder, 40, doomed, fatal).join()[doomed] == -signal.SIGKILL
        _check_what_the_next_start_finds(folder, {20, 40})
