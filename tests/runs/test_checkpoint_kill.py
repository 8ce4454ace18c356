"""SIGKILL at every moment of a save leaves the previous checkpoint intact, and no checkpoint is ever torn.

A moment is an operation of the process on the checkpoints folder, observed by an audit hook. To die at moment n, a rank
kills itself just before its n-th operation. The test then examines the folder as the next start would.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoint_helpers import Ranks, checkpointer, run_ranks, sharded_state

from megatron_rl.checkpoint import checkpoint_writer as writer_module
from megatron_rl.checkpoint import shards
from megatron_rl.checkpoint.publish import clean_up, find_latest
from megatron_rl.contract.manifest import find_corruption, read_manifest
from megatron_rl.contract.paths import RunDir

_TOUCHING = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


class _Moments:
    """Records the operations on files below `folder`, and kills the process at moment `fatal` (from 1; 0: never)."""

    def __init__(self, folder: Path, fatal: int) -> None:
        self._below = str(folder)
        self._fatal = fatal
        self.seen: list[str] = []
        sys.addaudithook(self._seen)
        write = shards.RecordedFile.write

        def torn(recorded: Any, data: Any) -> int:
            """Split each write of a shard in two halves, with a moment between them."""
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
    """Save step 20, then step `again`, during which rank `doomed` dies. Returns the rank's moments."""
    saver = checkpointer(folder, keep=1)
    saver.save(20, sharded_state(20.0, rank, world_size), {"cursor": 20})
    saver.wait(final=True)
    if fatal:  # the other rank must not wait long for the dead one
        writer_module.GRACE_S = 0.5
        saver = checkpointer(folder, keep=1, timeout_s=1)
    moments = _Moments(folder / "checkpoints", fatal if rank == doomed else 0)
    saver.save(again, sharded_state(40.0, rank, world_size), {"cursor": 40})
    saver.wait()
    return moments.seen


def _check_next_start(folder: Path, steps: set[int]) -> None:
    run_dir = RunDir(folder)
    clean_up(run_dir)
    latest = find_latest(run_dir)
    assert latest.passed_over == ()
    assert latest.step in steps
    manifest = read_manifest(run_dir.checkpoint(latest.step))
    assert find_corruption(run_dir.checkpoint(latest.step), manifest.files) is None
    assert {path.suffix for path in run_dir.checkpoints.iterdir()} == {""}


def _selected(moments: list[str]) -> list[int]:
    """Numbers of all moments except most writes: torch makes dozens of small, similar writes per tensor."""
    writes = [number for number, event in enumerate(moments, 1) if event == "write"]
    others = [number for number, event in enumerate(moments, 1) if event != "write"]
    assert len(others) >= 5
    return sorted({*others, *writes[:: max(1, len(writes) // 3)]})


# test_exactly_once.py tries all moments of a whole run in one process; here they are real.
@pytest.mark.parametrize("again", [pytest.param(40, marks=pytest.mark.slow), 20])
def test_single_rank_may_die_at_any_moment(tmp_path: Path, again: int) -> None:
    """The save is of a later step, or replaces a checkpoint of the same step."""
    (moments,) = run_ranks(tmp_path, 1, _two_saves, tmp_path / "whole", again, 0, 0)
    found = set()
    # Replacing a checkpoint differs only from the two renames near the end on.
    for fatal in _selected(moments) if again == 40 else _selected(moments)[-14:]:
        folder = tmp_path / f"killed-{fatal}"
        assert Ranks(tmp_path, 1, _two_saves, folder, again, 0, fatal).join() == [-signal.SIGKILL], fatal
        _check_next_start(folder, {20, again})
        found.add(read_manifest(RunDir(folder).checkpoint(find_latest(RunDir(folder)).step)).meta["cursor"])
    assert found == {20, 40}  # killed before and after the rename


@pytest.mark.parametrize("doomed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_one_of_two_ranks_may_die_at_any_moment(tmp_path: Path, doomed: int) -> None:
    moments = run_ranks(tmp_path, 2, _two_saves, tmp_path / "whole", 40, doomed, 0)[doomed]
    for fatal in _selected(moments)[1 :: max(1, len(_selected(moments)) // 3)]:
        folder = tmp_path / f"killed-{fatal}"
        assert Ranks(tmp_path, 2, _two_saves, folder, 40, doomed, fatal).join()[doomed] == -signal.SIGKILL
        _check_next_start(folder, {20, 40})
