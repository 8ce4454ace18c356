"""Control plane of a step: what ranks send one another beside tensors, and what they compute from it.

The ranks around the measured one are there already: what they send is ready. The start is of real processes.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection as Pipe
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from scale_rows import Cost, Row, cpu_seconds

from megatron_rl.algorithms.balance import balance
from megatron_rl.learn.rollout.exchange import _OFFER, _offers, _routes
from megatron_rl.rank.control import CHILDREN, Control, largest
from megatron_rl.rank.groups import TrainingReplicas
from megatron_rl.rank.metrics.stats import Reduction, Tally
from megatron_rl.rank.metrics.timeline import COMPARED, slowest

RANKS, REPLICAS = 16384, 2048
INTERIOR = 100  # rank with a parent and CHILDREN children
TALLIED = 80  # numbers of a step
LIMIT = timedelta(seconds=60)
REPEATS = 3


class Neighbour:
    """A rank whose messages are ready. Counts the bytes of both directions."""

    def __init__(self, content: bytes) -> None:
        self.content, self.bytes = content, 0

    def send(self, content: bytes) -> None:
        self.bytes += len(content)

    def receive(self) -> bytes:
        self.bytes += len(self.content)
        return self.content


def measured(call: Callable[[Control], object], below: Sequence[bytes], above: bytes | None) -> Cost:
    """Cost to a rank whose children send `below`, and whose parent answers `above`; None: to rank 0."""
    torch.set_num_threads(1)
    control: Any = Control(INTERIOR if above is not None else 0, RANKS)
    control._children = neighbours = [*map(Neighbour, below)]
    if above is not None:
        control._parent = Neighbour(above)
        neighbours = [control._parent, *neighbours]
    seconds = cpu_seconds(lambda: call(control), REPEATS)
    return Cost(seconds, sum(each.bytes for each in neighbours) // REPEATS)


def agreement(_ranks: int) -> Cost:
    return measured(lambda control: control.any(False, False), CHILDREN * [bytes(2)], bytes(2))


def states(prompts: int) -> Cost:
    own = torch.ones(1 + prompts, dtype=torch.int32)
    message = own.numpy().tobytes()
    return measured(lambda control: control.reduce(own, largest), CHILDREN * [message], message)


def offers(prompts: int) -> Cost:
    """Costs of all groups, and the assignment, which moves none."""
    table = np.zeros(prompts, _OFFER)
    table["position"] = np.random.default_rng(0).permutation(prompts)
    table["driver"] = RANKS // REPLICAS * (table["position"] % REPLICAS)
    table["cost"] = 1e15
    below = CHILDREN * [table[: prompts // CHILDREN**2].tobytes()]
    ranks = TrainingReplicas(RANKS // REPLICAS, REPLICAS, RANKS)

    def call(control: Control) -> None:
        found = _offers([], [], control)
        homes = [ranks.of(driver) for driver in found.drivers]
        assigned = balance(found.costs, homes, REPLICAS)
        _routes(found, homes, assigned, ranks, control.rank)

    return measured(call, below, table.tobytes())


def tally(ranks: int) -> Cost:
    """Sums of all ranks on rank 0, and the slowest ranks."""
    rows = np.random.default_rng(0).random((ranks, 1 + len(COMPARED)))
    rows[:, 0] = range(ranks)
    below = [np.zeros(TALLIED).tobytes() + part.tobytes() for part in np.array_split(rows[1:], CHILDREN)]

    def call(control: Control) -> None:
        control.size = ranks
        own = Tally()
        for number in range(TALLIED):
            own.put(str(number), Reduction.SUM, 1.0)
        for name in COMPARED:
            own.compare(name, 1.0)
        compared = own.reduce(control).compared
        assert compared is not None
        for name, seconds in compared.items():
            slowest(seconds, name)

    return measured(call, below, None)


def start(ranks: int) -> Cost:
    """Connections of all ranks, from the store to the first message: of the rank that needs most CPU time."""
    context = multiprocessing.get_context("fork")
    ports, pipes, processes = context.SimpleQueue(), [], []
    for rank in range(ranks):
        here, there = context.Pipe()
        pipes.append(here)
        processes.append(context.Process(target=_rank, args=(rank, ranks, ports, there), daemon=True))
        processes[-1].start()
    found = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    usual = {name: round(median(each[name] for each in found), 6) for name in found[0]}
    print(f"  {ranks} ranks, median: {json.dumps(usual)}")
    return Cost(max(each["cpu_s"] for each in found))


def _rank(rank: int, ranks: int, ports: Any, pipe: Pipe) -> None:
    torch.set_num_threads(1)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, True, LIMIT, wait_for_workers=False)
        for _ in range(ranks - 1):
            ports.put(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", ports.get(), None, False, LIMIT, wait_for_workers=False)
    cpu_s, began = time.process_time(), time.monotonic()
    control = Control.connect(store, rank, ranks, LIMIT)
    control.barrier()
    found = {"cpu_s": time.process_time() - cpu_s, "wall_s": time.monotonic() - began}
    found["sockets"] = (control._parent is not None) + len(control._children) + (ranks > 1)
    for name, call in (("agree", lambda: control.any(False)), ("tally", lambda: control.gather(rank))):
        control.barrier()
        cpu_s, began = time.process_time(), time.monotonic()
        for _ in range(20):
            call()
        found[f"{name}_cpu_us"] = round((time.process_time() - cpu_s) / 20 * 1e6)
        found[f"{name}_wall_us"] = round((time.monotonic() - began) / 20 * 1e6)
    pipe.send(found)
    control.barrier()


ROWS = [
    Row("agreement to go on", "ranks", (64, 1024, 4096, 16384), RANKS, agreement, 1e-3, 1000),
    Row("states of a step's groups", "prompts", (1024, 2048, 4096, 8192), 8192, states, 5e-3, 1_000_000),
    Row("costs and assignment of a step's groups", "prompts", (1024, 2048, 4096, 8192), 8192, offers, 0.02, 1_200_000),
    Row("tally of a step on rank 0", "ranks", (64, 1024, 4096, 16384), RANKS, tally, 0.02, 2_000_000),
    Row("start of the control tree", "processes", (32, 64, 128, 256), RANKS, start, 10.0),
]
