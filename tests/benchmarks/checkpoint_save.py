"""Seconds that a save blocks the step, and seconds until it is safe on disk, beside other ways to save.

    python tests/benchmarks/checkpoint_save.py [--repeats 5] [--folder DIR]

One rank, the same tensors for all, interleaved turns, medians. The first save of the process is reported separately,
because megatron-core then starts its helper processes and ours touches host memory for the first time.

On a CPU megatron-core's async save copies nothing: it forks, and the kernel copies the pages that training changes. On
a GPU it copies as ours does.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

from megatron_rl.checkpoint.save import Checkpointer
from megatron_rl.contract.paths import RunDir
from megatron_rl.rank.control import Control
from megatron_rl.recipe.save_section import SaveConfig

Seconds = tuple[float, float]  # blocked, total
TENSORS = 96
SIZES_MB = (3, 300)


def sharded(tensors: list[torch.Tensor]) -> dict[str, ShardedTensor]:
    return {f"w{i}": ShardedTensor.from_rank_offsets(f"w{i}", tensor) for i, tensor in enumerate(tensors)}


def ours(folder: Path) -> Callable[[list[torch.Tensor]], Seconds]:
    saver = Checkpointer(RunDir(folder), SaveConfig(keep=1), Control(0, 1))
    steps = iter(range(1, 1_000_000))

    def turn(tensors: list[torch.Tensor]) -> Seconds:
        saver.save(next(steps), sharded(tensors), {})
        saver.wait(final=True)
        (published,) = saver.poll()
        return published.blocked_s, published.total_s

    return turn


def ours_waited_for(folder: Path) -> Callable[[list[torch.Tensor]], Seconds]:
    """The same, waiting for the save: a synchronous save."""
    behind = ours(folder)

    def turn(tensors: list[torch.Tensor]) -> Seconds:
        started = time.perf_counter()
        behind(tensors)
        total = time.perf_counter() - started
        return total, total

    return turn


def megatron_sync(folder: Path) -> Callable[[list[torch.Tensor]], Seconds]:
    def turn(tensors: list[torch.Tensor]) -> Seconds:
        fresh(folder)
        started = time.perf_counter()
        dist_checkpointing.save(sharded(tensors), str(folder))
        total = time.perf_counter() - started
        return total, total

    return turn


def megatron_async(folder: Path) -> Callable[[list[torch.Tensor]], Seconds]:
    queue = AsyncCallsQueue()

    def turn(tensors: list[torch.Tensor]) -> Seconds:
        fresh(folder)
        started = time.perf_counter()
        queue.schedule_async_request(dist_checkpointing.save(sharded(tensors), str(folder), async_sharded_save=True))
        blocked = time.perf_counter() - started
        queue.maybe_finalize_async_calls(blocking=True)
        return blocked, time.perf_counter() - started

    return turn


def torch_save(folder: Path) -> Callable[[list[torch.Tensor]], Seconds]:
    def turn(tensors: list[torch.Tensor]) -> Seconds:
        fresh(folder)
        started = time.perf_counter()
        with (folder / "tensors.pt").open("wb") as file:
            torch.save(tensors, file)
            file.flush()
            os.fsync(file.fileno())
        total = time.perf_counter() - started
        return total, total

    return turn


def plain_write(folder: Path) -> Callable[[list[torch.Tensor]], Seconds]:
    def turn(tensors: list[torch.Tensor]) -> Seconds:
        fresh(folder)
        started = time.perf_counter()
        with (folder / "bytes").open("wb") as file:
            for tensor in tensors:
                file.write(memoryview(tensor.numpy()).cast("B"))
            file.flush()
            os.fsync(file.fileno())
        total = time.perf_counter() - started
        return total, total

    return turn


def copy_only(_: Path) -> Callable[[list[torch.Tensor]], Seconds]:
    """Lower bound of the blocked time of any save in the background."""
    copies: list[torch.Tensor] = []

    def turn(tensors: list[torch.Tensor]) -> Seconds:
        started = time.perf_counter()
        if not copies:
            copies.extend(torch.empty_like(tensor) for tensor in tensors)
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor)
        total = time.perf_counter() - started
        return total, total

    return turn


WAYS = {
    "ours": ours,
    "ours, waited for": ours_waited_for,
    "megatron-core sync": megatron_sync,
    "megatron-core async": megatron_async,
    "torch.save, fsync": torch_save,
    "plain write, fsync": plain_write,
    "copy in memory": copy_only,
}


def fresh(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def measure(megabytes: int, repeats: int, folder: Path) -> float:
    """Print the table. Returns megatron-core's median blocked seconds (its better way) over ours."""
    tensors = [torch.randn(megabytes * 1_000_000 // 4 // TENSORS) for _ in range(TENSORS)]
    turns = {name: way(folder / name.replace(" ", "-")) for name, way in WAYS.items()}
    seen: dict[str, list[Seconds]] = {name: [] for name in WAYS}
    for _ in range(1 + repeats):
        for name, turn in turns.items():
            seen[name].append(turn(tensors))
    print(f"\n{megabytes} MB in {TENSORS} tensors: seconds, first save | median of the next {repeats}")
    print(f"{'':22}{'blocked':>10}{'total':>10}  |{'blocked':>10}{'total':>10}")
    median = {}
    for name, (first, *rest) in seen.items():
        blocked, total = (statistics.median(column) for column in zip(*rest, strict=True))
        median[name] = blocked
        print(f"{name:22}{first[0]:10.4f}{first[1]:10.4f}  |{blocked:10.4f}{total:10.4f}")
    return min(median["megatron-core sync"], median["megatron-core async"]) / median["ours"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="folder for checkpoints (default: a temporary one)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        # Only megatron-core's own save needs CUDA.
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
        torch.cuda.synchronize = lambda device=None: None
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ratios = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        for megabytes in SIZES_MB:
            ratios[megabytes] = measure(megabytes, arguments.repeats, Path(name) / str(megabytes))
    print(
        "\nblocked, megatron-core's better way over ours:", ", ".join(f"{r:.1f}x at {m} MB" for m, r in ratios.items())
    )
    print(f"ratio: {ratios[SIZES_MB[0]]:.1f}")


if __name__ == "__main__":
    main()
