"""A failed save logs a warning and keeps the previous checkpoint: full disk, lost rank, hanging file system."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_helpers import Ranks, checkpointer, load, outcome, run_ranks, same, sharded_state, world
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_rl.checkpoint import checkpoint_writer as writer_module
from megatron_rl.checkpoint import shards
from megatron_rl.checkpoint.publish import find_latest
from megatron_rl.checkpoint.save import SaveFailed
from megatron_rl.checkpoint.shards import write_part
from megatron_rl.contract.manifest import CheckpointError, CheckpointSaved, find_corruption, read_manifest
from megatron_rl.contract.paths import RunDir

MIB = 1 << 20


pytestmark = pytest.mark.usefixtures("one_rank")


def big_state(value: float, mib: int, rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    mine = torch.full((mib * MIB // 4 // world_size,), value)
    return {"weight": ShardedTensor.from_rank_offsets("weight", mine, (0, rank, world_size))}


def intact(folder: Path) -> bool:
    return find_corruption(folder, read_manifest(folder).files) is None


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in RunDir(folder).checkpoints.iterdir())


def test_full_disk_leaves_the_previous_checkpoint_and_the_run_continues(small_disk: Path) -> None:
    saver = checkpointer(small_disk, keep=1)
    saver.save(20, big_state(1.0, 4), {})
    assert isinstance(outcome(saver), CheckpointSaved)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(10 * MIB))

    saver.save(40, big_state(2.0, 4), {})
    failed = outcome(saver)
    assert isinstance(failed, SaveFailed)
    assert failed.step == 40
    assert "No space left on device" in str(failed)
    assert "untouched" in str(failed)
    assert names(small_disk) == ["latest", "step-000020"]
    assert find_latest(RunDir(small_disk)).step == 20
    assert intact(RunDir(small_disk).checkpoint(20))

    ballast.unlink()
    saver.save(60, big_state(3.0, 4), {})
    assert isinstance(outcome(saver), CheckpointSaved)
    assert names(small_disk) == ["latest", "step-000060"]


def test_full_disk_at_the_final_save_is_one_clear_error(small_disk: Path) -> None:
    saver = checkpointer(small_disk)
    saver.save(20, sharded_state(1.0), {})
    saver.wait()
    _fill(small_disk / "ballast", leave=0)
    saver.save(40, sharded_state(2.0), {})
    with pytest.raises(CheckpointError, match=r"of step 40, was not saved: No space left.*newest is that of step 20"):
        saver.wait(final=True)


def _fill(ballast: Path, leave: int) -> None:
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC
        file.truncate(max(0, file.tell() // 4096 * 4096 - leave))


def _one_rank_fails(rank: int, world_size: int, folder: Path) -> Any:
    saver = checkpointer(folder, timeout_s=3600)  # `run_ranks` waits for a minute
    saver.save(20, sharded_state(1.0, rank, world_size), {})
    saver.wait()

    def broken(*args: Any) -> Any:
        write_part(*args)
        raise OSError(errno.EIO, "Input/output error", "the disk of rank 1")

    if rank == 1:
        writer_module.write_part = broken
    saver.save(40, sharded_state(2.0, rank, world_size), {})
    saver.wait()
    return [str(event) if isinstance(event, SaveFailed) else event.step for event in saver.poll()]


def test_failure_of_any_rank_is_reported_by_rank_0_at_once(tmp_path: Path) -> None:
    first, second = run_ranks(tmp_path, 2, _one_rank_fails, tmp_path)
    assert first[0] == second[0] == 20
    assert "rank 1: Input/output error: the disk of rank 1" in first[1]
    assert "Input/output error" in second[1]
    assert find_latest(RunDir(tmp_path)).step == 20


def _one_rank_dies(rank: int, world_size: int, folder: Path) -> Any:
    saver = checkpointer(folder, timeout_s=2)
    saver.save(20, sharded_state(1.0, rank, world_size), {})
    saver.wait()
    saver.poll()
    if rank == 1:
        writer_module.write_part = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    saver.save(40, sharded_state(2.0, rank, world_size), {})
    with pytest.raises(CheckpointError, match="waiting for the shards of rank 1"):
        saver.wait(final=True)


def test_save_with_a_dead_rank_ends_at_the_timeout(tmp_path: Path) -> None:
    codes = Ranks(tmp_path, 2, _one_rank_dies, tmp_path).join(30)
    assert codes == [0, -signal.SIGKILL]
    assert find_latest(RunDir(tmp_path)).step == 20
    assert intact(RunDir(tmp_path).checkpoint(20))


def test_save_beyond_the_timeout_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*args: Any) -> Any:
        time.sleep(1.1)
        return write_part(*args)

    monkeypatch.setattr(writer_module, "write_part", slow)
    saver = checkpointer(tmp_path, timeout_s=1)
    saver.save(20, sharded_state(1.0), {})
    failed = outcome(saver)
    assert isinstance(failed, SaveFailed)
    assert "not done within save.timeout_s = 1 s" in failed.reason
    assert names(tmp_path) == []


def test_hanging_write_blocks_the_loop_no_longer_than_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write hangs like one to a network file system whose server is down. The memory being written is not reused
    meanwhile, and the run saves again once the server is back."""
    back = Event()

    def hangs(*args: Any) -> Any:
        back.wait(3600)
        return write_part(*args)

    monkeypatch.setattr(writer_module, "write_part", hangs)
    monkeypatch.setattr(writer_module, "GRACE_S", 0.1)
    saver = checkpointer(tmp_path, timeout_s=1)
    saver.save(20, sharded_state(1.0), {})
    saver.save(40, sharded_state(2.0), {})
    assert [(event.step, "hang" in event.reason) for event in saver.poll()] == [(20, True), (40, True)]
    assert saver.saving is None  # the failed save is no longer awaited
    back.set()
    limit = time.monotonic() + 10
    while not saver.wait() and time.monotonic() < limit:
        time.sleep(0.01)
    saver.poll()
    saver.save(60, sharded_state(3.0), {})
    assert isinstance(outcome(saver), CheckpointSaved)
    state, _ = load(RunDir(tmp_path).checkpoint(60), sharded_state(0.0), world())
    assert same(state["model"]["split"], sharded_state(3.0)["model"]["split"].data)


def test_save_waits_for_the_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resume = Event()

    def held(*args: Any) -> Any:
        resume.wait(20)
        return write_part(*args)

    monkeypatch.setattr(writer_module, "write_part", held)
    saver = checkpointer(tmp_path)
    saver.save(20, sharded_state(1.0), {})
    assert saver.poll() == []  # still in progress, and poll does not wait
    resume.set()
    saver.save(40, sharded_state(2.0), {})
    saver.wait(final=True)
    assert [event.step for event in saver.poll()] == [20, 40]


def test_bug_in_a_save_is_raised_and_not_logged_as_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(*args: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(writer_module, "write_part", faulty)
    saver = checkpointer(tmp_path)
    saver.save(20, sharded_state(1.0), {})
    with pytest.raises(ZeroDivisionError):
        saver.wait()


# A rank that must leave in time


def test_wait_ends_at_its_deadline_and_the_save_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resume = Event()
    monkeypatch.setattr(writer_module, "write_part", lambda *args: resume.wait(3600) and write_part(*args))
    saver = checkpointer(tmp_path)
    assert saver.saving is None
    saver.save(20, sharded_state(1.0), {})
    assert not saver.wait(until=time.monotonic() + 0.2)
    assert saver.saving == 20
    resume.set()
    assert saver.wait(until=time.monotonic() + 20)
    assert saver.saving is None
    assert isinstance(outcome(saver), CheckpointSaved)


def _abandon(rank: int, world_size: int, folder: Path, all_ranks: bool) -> Any:
    """Abandon a save in the middle of a large tensor, whose write in slow chunks would take minutes."""
    saver = checkpointer(folder)
    saver.save(20, sharded_state(1.0, rank, world_size), {})
    saver.wait(final=True)
    shards._CHUNK_BYTES = 4096
    write = shards.RecordedFile.write

    class Slow:
        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: Any) -> int:
            time.sleep(0.05)
            return int(self.file.write(data))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    def slowly(recorded: Any, data: Any) -> int:
        if len(memoryview(data)) <= 4096:
            return write(recorded, data)
        file, recorded._file = recorded._file, Slow(recorded._file)
        try:
            return write(recorded, data)
        finally:
            recorded._file = file

    shards.RecordedFile.write = slowly  # type: ignore[method-assign]
    saver.save(40, big_state(2.0, 64, rank, world_size), {})
    time.sleep(0.5)
    assert saver.saving == 40
    dist.barrier()
    if rank == 0 or all_ranks:
        saver.abandon("no time left")
    in_time = saver.wait(until=time.monotonic() + 20)
    shards.RecordedFile.write = write  # type: ignore[method-assign]
    dist.barrier()
    kinds = [(type(event).__name__, event.step) for event in saver.poll()]
    saver.save(60, sharded_state(3.0, rank, world_size), {})
    saver.wait(final=True)
    return in_time, kinds


@pytest.mark.parametrize("all_ranks", [False, True])
def test_save_can_be_abandoned_within_seconds_and_the_previous_checkpoint_stays(
    tmp_path: Path, all_ranks: bool
) -> None:
    expected = [(True, [("CheckpointSaved", 20), ("SaveFailed", 40)])] * 2
    assert run_ranks(tmp_path, 2, _abandon, tmp_path, all_ranks) == expected
    assert names(tmp_path) == ["latest", "step-000020", "step-000060"]
    assert intact(RunDir(tmp_path).checkpoint(20))


# The failure of any single file of a checkpoint


def test_disk_that_runs_out_of_inodes_at_any_file_fails_the_save(small_disk: Path) -> None:
    """Each try allows one more file, so each file of a checkpoint is once the first that cannot be created."""
    saver = checkpointer(small_disk, keep=1)
    saver.save(20, sharded_state(1.0), {})
    assert isinstance(outcome(saver), CheckpointSaved)
    disk = os.statvfs(small_disk)
    failed = set()
    for more in range(1, 20):
        limit = f"remount,nr_inodes={disk.f_files - disk.f_ffree + more}"
        subprocess.run(["mount", "-o", limit, str(small_disk)], check=True)
        saver.save(40, sharded_state(2.0), {})
        event = outcome(saver)
        if isinstance(event, CheckpointSaved):
            break
        assert "No space left on device" in event.reason
        failed.add(Path(event.reason).name)
        assert names(small_disk) == ["latest", "step-000020"]
        assert intact(RunDir(small_disk).checkpoint(20))
    assert names(small_disk) == ["latest", "step-000040"]
    for name in ("__0_0.distcp", "common.pt", "metadata.json", ".metadata", "latest", "manifest.json"):
        assert any(name in seen for seen in failed), name
