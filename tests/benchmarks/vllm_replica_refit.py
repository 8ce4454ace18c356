"""Refit of replicas with each engine, idle and while they generate, beside a broadcast of the same bytes over gloo to
one process."""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from engine import prompts
from vllm_replica_engines import PROMPT, request_of
from vllm_replica_sides import ENGINES, LIMIT, Setting, Side, Trainer, print_table, seconds_of, training

UNDER_WAY = 8
"""Answers that a replica generates during a refit."""
FEW_TOKENS = 4 * UNDER_WAY
"""Tokens of these answers, all together, after which the refit begins."""


def measure(setting: Setting, repeats: int) -> None:
    transfers: dict[str, list[float]] = defaultdict(list)
    swaps: dict[str, list[float]] = defaultdict(list)
    moved = 0
    with tempfile.TemporaryDirectory(prefix="vllm-", dir="/dev/shm") as scratch, ExitStack() as stack:
        trainer = stack.enter_context(training(setting))
        sides = [stack.enter_context(Side(trainer, engine, Path(scratch, engine))) for engine in ENGINES]
        for side in sides:
            side.publish(probed=side.name == ENGINES["vllm"])
            moved = side.refit.moved_bytes
        peer = stack.enter_context(receiver(Path(scratch, "store"), moved, repeats))
        buffer = torch.zeros(moved, dtype=torch.uint8)
        for _ in range(repeats):
            for side in sides:
                for name, answers in ((f"{side.name}, idle", 0), (f"{side.name}, generating", UNDER_WAY)):
                    asyncio.run(publish_beside(side, trainer, answers))
                    transfers[name].append(side.control.transfer_s)
                    swaps[name].append(side.control.swap_s)
            transfers["broadcast"].append(seconds_of(lambda: broadcast(peer, buffer)))
    print(f"SmolLM2-135M-Instruct in {setting.dtype}, {moved / 1e6:.0f} MB, {setting.threads} threads, {repeats} turns")
    least = statistics.median(transfers["broadcast"])
    columns = ("", "transfer, s", "GB/s", "pause to resume, s", "both", "both / broadcast")
    print_table(columns, (row(name, moved, transfers[name], swaps.get(name), least) for name in transfers))


def row(name: str, moved: int, transfers: list[float], swaps: list[float] | None, least: float) -> list[str]:
    """Cells of one way. least: seconds of the broadcast."""
    transfer, swap = statistics.median(transfers), statistics.median(swaps) if swaps else 0.0
    paused = f"{swap:.3f}" if swaps else ""
    rate, both = f"{moved / transfer / 1e9:.2f}", transfer + swap
    return [name, f"{transfer:.3f}", rate, paused, f"{both:.3f}", f"{both / least:.1f}"]


async def publish_beside(side: Side, trainer: Trainer, answers: int) -> None:
    """Publish a version while the replica generates answers, which are then cancelled."""
    setting = trainer.setting
    asked = prompts(answers, PROMPT, trainer.vocabulary, [setting.longest - PROMPT] * answers)
    tasks = [asyncio.ensure_future(side.pool.generate(request_of(key, one))) for key, one in enumerate(asked)]
    while answers and sum(len(part.prefix.tokens) for part in side.pool.partial_answers()) < FEW_TOKENS:
        await asyncio.sleep(0.05)
    await asyncio.to_thread(side.publish)
    assert not any(task.done() for task in tasks), "the answers ended before the refit"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# A broadcast to one process


@contextmanager
def receiver(store: Path, size: int, repeats: int) -> Iterator[dist.ProcessGroupGloo]:
    """Yield the group of this process and one that takes part in `repeats` broadcasts."""
    process = multiprocessing.get_context("spawn").Process(target=_receive, args=(store, size, repeats), daemon=True)
    process.start()
    try:
        yield dist.ProcessGroupGloo(dist.FileStore(str(store), 2), 0, 2, LIMIT)
        process.join(LIMIT.total_seconds())
    finally:
        process.kill()


def _receive(store: Path, size: int, repeats: int) -> None:
    group, buffer = (
        dist.ProcessGroupGloo(dist.FileStore(str(store), 2), 1, 2, LIMIT),
        torch.zeros(size, dtype=torch.uint8),
    )
    for _ in range(repeats):
        broadcast(group, buffer)


def broadcast(group: dist.ProcessGroupGloo, buffer: torch.Tensor) -> None:
    """Send the buffer from rank 0, and wait until it has arrived."""
    group.broadcast([buffer], dist.BroadcastOptions()).wait()
    group.barrier().wait()
