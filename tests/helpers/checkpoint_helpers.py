"""Helpers for tests of checkpoints: small sharded states, and ranks that are real processes."""

from __future__ import annotations

import datetime
import multiprocessing
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from megatron_rl.checkpoint.load import read, verify
from megatron_rl.checkpoint.save import Checkpointer, SaveFailed
from megatron_rl.contract.manifest import CheckpointSaved
from megatron_rl.contract.paths import RunDir
from megatron_rl.rank.control import Control
from megatron_rl.recipe.save_section import SaveConfig

_CONTEXT = multiprocessing.get_context("forkserver")  # see conftest.py


def checkpointer(folder: Path, **config: Any) -> Checkpointer:
    return Checkpointer(RunDir(folder), SaveConfig(**config), control())


def load(
    folder: Path, sharded_state: dict[str, Any], data: dist.ProcessGroup, expert_data: dist.ProcessGroup | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Verify a checkpoint, and return its state and meta."""
    return read(verify(folder, control()), sharded_state, data, expert_data)


def world() -> dist.ProcessGroup:
    """Gloo group of all ranks."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


@cache
def control() -> Control:
    """Control tree of all ranks of this process's world."""
    store = dist.PrefixStore("control", dist.distributed_c10d._get_default_store())
    return Control.connect(store, dist.get_rank(), dist.get_world_size(), datetime.timedelta(seconds=30))


def sharded_state(value: float, rank: int = 0, world_size: int = 1, rows: int = 64) -> dict[str, Any]:
    """State with a tensor split over the ranks, a replicated tensor, an object per rank, and plain values."""
    local = rows // world_size
    mine = value + torch.arange(rank * local, (rank + 1) * local, dtype=torch.float32)
    return {
        "model": {
            "split": ShardedTensor.from_rank_offsets("split", mine[:, None].repeat(1, 3), (0, rank, world_size)),
            "replicated": ShardedTensor.from_rank_offsets(
                "replicated", torch.full((5,), value, dtype=torch.bfloat16), replica_id=rank
            ),
        },
        "rng": ShardedObject("rng", {"seed": torch.tensor([rank, int(value)])}, (world_size,), (rank,)),
        "optimizer": {"param_groups": [{"lr": value, "params": [0, 1]}]},
    }


def same(one: Any, other: Any) -> bool:
    """Whether nested dicts and lists of tensors are bit-equal."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def data_of(state: Any) -> Any:
    """Return a sharded state as `load` returns it."""
    if isinstance(state, (ShardedTensor, ShardedObject)):
        return state.data
    if isinstance(state, dict):
        return {key: data_of(item) for key, item in state.items()}
    return state


def outcome(checkpointer: Checkpointer) -> CheckpointSaved | SaveFailed:
    """Wait for the only save in progress, and return its outcome."""
    checkpointer.wait()
    (only,) = checkpointer.poll()
    return only


def ended(processes: Sequence[BaseProcess], timeout_s: float) -> list[int | None]:
    """Wait for processes, kill those that run after `timeout_s`, and return the exit codes."""
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


class Ranks:
    """Runs `function(rank, world_size, *args)` in one process per rank, in their own gloo group."""

    def __init__(self, folder: Path, world_size: int, function: Callable[..., Any], *args: Any) -> None:
        self.folder = folder / f"ranks-{time.monotonic_ns()}"
        self.folder.mkdir(parents=True)
        self.processes = [
            _CONTEXT.Process(target=_rank, args=(self.folder, rank, world_size, function, args), daemon=True)
            for rank in range(world_size)
        ]
        for process in self.processes:
            process.start()

    def join(self, timeout_s: float = 60.0) -> list[int | None]:
        """Return the exit codes. No process survives this call."""
        return ended(self.processes, timeout_s)

    def results(self, timeout_s: float = 60.0) -> list[Any]:
        codes = self.join(timeout_s)
        errors = "\n".join(path.read_text() for path in sorted(self.folder.glob("error.*")))
        assert codes == [0] * len(codes), f"exit codes {codes}\n{errors}"
        return [pickle.loads((self.folder / f"result.{rank}").read_bytes()) for rank in range(len(codes))]


def run_ranks(folder: Path, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    return Ranks(folder, world_size, function, *args).results()


def _rank(folder: Path, rank: int, world_size: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.HashStore() if world_size == 1 else dist.FileStore(str(folder / "store"), world_size)
    limit = datetime.timedelta(seconds=30)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    try:
        result = function(rank, world_size, *args)
    except BaseException:
        (folder / f"error.{rank}").write_text(traceback.format_exc())
        raise
    (folder / f"result.{rank}").write_bytes(pickle.dumps(result))
