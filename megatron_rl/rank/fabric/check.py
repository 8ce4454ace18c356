"""Check that the nodes reach each other fast enough. One process per GPU, before the ranks start:

    srun ... python -m megatron_rl.rank.fabric.check --run-dir RUN_DIR --attempt N [--slower-than GBPS]

All ranks all-reduce together for some seconds. If that fails or is slow, pairs of neighbouring nodes do so, which shows
the node to blame. Rank 0 writes Attempt.fabric, which launcher.host.judge.nodes reads with the nodes' own reports.

Every all-reduce runs in a child process that its parent kills at a deadline, because a collective that hangs in a
driver cannot be interrupted. Parents communicate through a TCP store and touch no GPU.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.contract.attempt_records import Address, AllReduce
from megatron_rl.contract.files import WRITE_PATIENCE_S
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.records import Absent, Unreadable, read, write
from megatron_rl.contract.shapes import from_json, to_json
from megatron_rl.rank.fabric.findings import (
    Edge,
    findings,
    is_bad,
    rounds,
    summary,
    unusable,
    whole_nodes,
    worst,
)
from megatron_rl.rank.rendezvous import meet
from megatron_rl.recipe.config import read_config
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.job import JobConfig

logger = logging.getLogger("megatron_rl.rank.fabric.check")

MEASURE_S = 10.0
BYTES = {"cuda": 1 << 28, "cpu": 1 << 22}  # bytes of the reduced fp32 tensor, by device
FORK = multiprocessing.get_context("fork")  # fast: torch is imported already. Safe: this process has not touched CUDA.


@dataclass(frozen=True, slots=True)
class FabricTimeouts:
    """Limits in seconds."""

    meet: float = 120.0  # time between the arrivals of the first and the last rank
    stage: float = 90.0  # one group's initialisation and its all-reduces
    slack: float = 30.0  # a parent's time to end its child and report


@dataclass(frozen=True, slots=True)
class Stage:
    """One group of ranks that all-reduces together."""

    name: str
    members: tuple[int, ...]


def run(
    attempt: Attempt,
    job: JobConfig,
    rank: int,
    size: int,
    local_rank: int,
    slower_than: float | None,
    timeouts: FabricTimeouts,
) -> None:
    """Take part as one rank. Rank 0 writes the findings. Raises dist.DistError if rank 0 has gone."""
    address = attempt.address("fabric")
    store = meet(address, rank, size, timedelta(seconds=timeouts.meet))
    board = Board(store, rank, size)
    hosts = board.exchange(
        "host", os.environ.get("SLURMD_NODENAME") or socket.gethostname(), range(size), timeouts.meet
    )
    nodes = whole_nodes(hosts)
    members = tuple(member for ranks in nodes.values() for member in ranks)
    if rank not in members and rank != 0:  # rank 0 serves the others' board in any case
        return
    began = time.monotonic()
    broken: dict[str, str] = {}

    def reduce(stages: Sequence[Stage]) -> dict[str, AllReduce]:
        """Results of stages that share no rank, the same on every rank."""
        mine = next((stage for stage in stages if rank in stage.members), None)
        found = mine and in_child(lambda: measure(address, job, mine, rank, local_rank), timeouts.stage)
        key = "+".join(stage.name for stage in stages)
        found_by_rank = board.exchange(key, found and to_json(found), members, timeouts.stage + timeouts.slack)
        answers = [None if one is None else from_json(AllReduce, one) for one in found_by_rank]
        broken.update(unusable(hosts, answers))
        return {stage.name: worst([answers[one] for one in stage.members]) for stage in stages}

    whole = reduce([Stage("all", members)])["all"]
    names = [name for name in nodes if name not in broken]
    pairs: dict[Edge, AllReduce] = {}
    if is_bad(whole, slower_than):
        for edges in rounds(len(names)):
            stages = {
                edge: Stage(f"{edge[0]}-{edge[1]}", nodes[names[edge[0]]] + nodes[names[edge[1]]]) for edge in edges
            }
            found = reduce(list(stages.values()))
            pairs |= {edge: found[stage.name] for edge, stage in stages.items()}
    if rank == 0:
        report = findings(names, whole, pairs, slower_than, time.monotonic() - began, broken)
        write(attempt.fabric, report, patience=WRITE_PATIENCE_S)
        for line in summary(report):
            logger.info(line)
    board.leave(members, timeouts.slack)


class Board:
    """Exchange of JSON values between the ranks, through rank 0."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size

    def exchange(self, key: str, mine: Any, members: Sequence[int], limit: float) -> list[Any]:
        """Values of all ranks under `key`; None for ranks outside `members` or later than `limit` seconds.

        Collective. Raises dist.DistError if rank 0 is silent.
        """
        self._store.set(f"{key}/{self._rank}", json.dumps(mine))
        if self._rank == 0:
            give_up = time.monotonic() + limit
            answers = [self._await(f"{key}/{rank}", give_up) if rank in members else None for rank in range(self._size)]
            self._store.set(f"{key}/answers", json.dumps(answers))
        self._store.wait([f"{key}/answers"], timedelta(seconds=2 * limit))
        answered: list[Any] = json.loads(self._store.get(f"{key}/answers"))
        return answered

    def leave(self, members: Sequence[int], limit: float) -> None:
        """Keep rank 0 alive until the others have left."""
        self._store.set(f"left/{self._rank}", "true")
        if self._rank == 0:
            give_up = time.monotonic() + limit
            for rank in members:
                self._await(f"left/{rank}", give_up)

    def _await(self, key: str, give_up: float) -> Any:
        try:
            self._store.wait([key], timedelta(seconds=max(0.1, give_up - time.monotonic())))
        except dist.DistStoreError:
            return None
        return json.loads(self._store.get(key))


def in_child(work: Callable[[], AllReduce], limit: float) -> AllReduce:
    """Result of `work` in a child process, or its error. A child that hangs in a driver is abandoned."""
    reader, writer = FORK.Pipe(duplex=False)
    child = FORK.Process(target=_report, args=(work, writer), daemon=True)
    child.start()
    writer.close()
    try:
        if not reader.poll(limit):
            return AllReduce(error=f"no end within {limit:.0f} s")
        found: AllReduce = reader.recv()
        return found
    except EOFError:
        child.join(1.0)
        return AllReduce(error=f"its process ended with code {child.exitcode}")
    finally:
        child.kill()
        child.join(1.0)
        reader.close()


def _report(work: Callable[[], AllReduce], writer: Connection) -> None:
    try:
        writer.send(work())
    except (RuntimeError, ValueError, OSError) as error:
        message = f"{socket.gethostname()}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        # Only the choice of the device, which involves no other rank, raises a ConfigurationError.
        writer.send(AllReduce(error=message, unusable=isinstance(error, ConfigurationError)))
    os._exit(0)  # a normal exit waits for communicators whose peers may be gone


def measure(address: Path, job: JobConfig, stage: Stage, rank: int, local_rank: int) -> AllReduce:
    """Bus bandwidth of an all-reduce among `stage.members`, 2 (n - 1) / n * bytes / seconds as in nccl-tests
    (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md)."""
    from megatron_rl.model.platform.select import select  # only in the child: it may touch CUDA

    rendezvous = read(Address, address)
    if isinstance(rendezvous, Absent | Unreadable):
        raise OSError(f"the address of rank 0 cannot be read: {rendezvous}")
    platform = select(job, local_rank)
    limit = timedelta(seconds=FabricTimeouts().stage)
    store = dist.TCPStore(rendezvous.host, rendezvous.port, None, False, limit, wait_for_workers=False)
    size = len(stage.members)
    dist.init_process_group(
        platform.backend,
        store=dist.PrefixStore(f"group/{stage.name}", store),
        rank=stage.members.index(rank),
        world_size=size,
        timeout=limit,
    )
    tensor = torch.full((BYTES[job.device] // 4,), float(rank), device=platform.device)
    dist.all_reduce(tensor)
    expected = float(sum(stage.members))
    if not bool((tensor == expected).all()):
        raise ValueError(f"the sum over the ranks is {tensor.min().item()} to {tensor.max().item()}, not {expected}")
    tensor.zero_()
    once = _seconds(tensor, 1, platform.synchronize)
    slowest = torch.tensor([once], device=platform.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)  # all ranks must repeat the same number of times
    times = max(1, min(200, int(MEASURE_S / slowest.item())))
    seconds = _seconds(tensor, times, platform.synchronize) / times
    gbps = 2 * (size - 1) / size * tensor.numel() * 4 / seconds / 1e9
    return AllReduce(gbps=gbps, seconds=seconds)


def _seconds(tensor: torch.Tensor, times: int, synchronize: Callable[[], None]) -> float:
    synchronize()
    began = time.monotonic()
    for _ in range(times):
        dist.all_reduce(tensor)
    synchronize()
    return time.monotonic() - began


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_rl.rank.fabric.check", description="All-reduce between the nodes."
    )
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--slower-than", type=float, help="GB/s of bus bandwidth below which a group of nodes is slow")
    parser.add_argument("--meet-s", type=float, default=FabricTimeouts().meet, help="seconds for all ranks to arrive")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout)
    run_dir = RunDir(options.run_dir)
    config = read_config(run_dir)
    rank, size, local_rank = (int(os.environ[name]) for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"))
    timeouts = FabricTimeouts(meet=options.meet_s)
    run(run_dir.attempt(options.attempt), config.job, rank, size, local_rank, options.slower_than, timeouts)


if __name__ == "__main__":
    main()
