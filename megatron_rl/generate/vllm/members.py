"""A vLLM over several nodes, with one process of ours on each:

    rank 0    front       chooses ports of its node and publishes them, starts `vllm serve`, and serves the run
    rank 1    follower    waits for the ports, starts `vllm serve --headless`, and reports its end
    ...

Such a start is one world. Whichever process ends, the launcher ends the others and starts the replica again. vLLM
itself notices a lost node only when it computes the next time.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

from megatron_rl.contract.attempt_records import Address
from megatron_rl.contract.files import WRITE_PATIENCE_S, names_in
from megatron_rl.contract.paths import Replica
from megatron_rl.contract.records import write
from megatron_rl.generate.replica.lifecycle import RankWork, ReplicaRank
from megatron_rl.generate.vllm.command import VllmMember
from megatron_rl.generate.vllm.process import VllmClosed, VllmProcess
from megatron_rl.generate.vllm.start import VllmStart
from megatron_rl.rank.addresses import address_towards, await_address, own_address, pin_gloo_interface

LOOK_S = 1.0
FRONT_LEAVES_S = 60.0
"""Seconds in which the front of a replica that is asked to leave must end before its followers do."""
NOTED_S = 5.0
"""Seconds in which the others see the outcome that the front has written before it ended vLLM."""


def met(here: ReplicaRank, parts: int) -> VllmMember | None:
    """Meet the other nodes of this start; None if there are none.

    parts: data-parallel parts of the replica, whose engines on other nodes ask the first node.

    Raises TimeoutError if the front has published no address in time, and ConfigurationError.
    """
    world, replica, number = here.world, here.replica, here.number
    if world.size == 1:
        return None
    files = [replica.address(f"vllm-{number}"), *[replica.address(f"engines-{number}")] * (parts > 1)]
    if world.rank == 0:
        host = own = own_address()
        ports = _free_ports(host, len(files))
        for file, port in zip(files, ports, strict=True):
            file.parent.mkdir(parents=True, exist_ok=True)
            write(file, Address(host, port), patience=WRITE_PATIENCE_S)
    else:
        limit = timedelta(seconds=here.config.job.silence_limit_s)
        found = [await_address(file, limit) for file in files]
        host, ports = found[0].host, [each.port for each in found]
        own = address_towards(host) or own_address()
    pin_gloo_interface(own)
    return VllmMember(world.rank, world.size, own, host, ports[0], ports[1] if parts > 1 else None)


def _free_ports(host: str, count: int) -> list[int]:
    """Ports that are free now. If another process takes one before vLLM does, this start fails, and the next has
    others."""
    listeners = [socket.create_server((host, 0)) for _ in range(count)]
    ports = [int(listener.getsockname()[1]) for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


@contextmanager
def following(here: ReplicaRank, start: VllmStart) -> Iterator[RankWork]:
    """Start this node's part of vLLM, which ends with the context."""
    process = start.begin()
    try:
        yield partial(_follow, here, process)
    finally:
        process.end()


def _follow(here: ReplicaRank, process: VllmProcess) -> None:
    """Give signs of life until the front has left. Raises VllmClosed if this node's part of vLLM ends before."""
    asked_at: float | None = None
    while not _is_over(here.replica):
        try:
            process.check()
        except VllmClosed:
            time.sleep(NOTED_S)
            if _is_over(here.replica):
                return
            raise
        here.activity.beat()
        now = time.monotonic()
        if asked_at is None and here.drain.asked:
            asked_at = now
        if asked_at is not None and now - asked_at > FRONT_LEAVES_S:
            return
        time.sleep(LOOK_S)


def _is_over(replica: Replica) -> bool:
    """Whether the front has noted how it leaves."""
    return replica.outcome.name in names_in(replica.outcome.parent)  # a lookup of the name alone may be cached
