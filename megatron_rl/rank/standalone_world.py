"""Worlds that are of no run: one process that has all of a model, or a few that hold it together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

from megatron_rl.platform.api import Platform
from megatron_rl.platform.select import select
from megatron_rl.rank.config import JobConfig, TrainingLayout
from megatron_rl.rank.groups import Groups, check_divides, cut, disconnect

COLLECTIVE_TIMEOUT = timedelta(hours=1)
"""That what ranks do together may take."""


@dataclass(frozen=True, slots=True)
class StandaloneWorld:
    """Of a rank in such a world."""

    rank: int
    size: int
    local_rank: int
    store: dist.Store
    """By which they meet."""

    @classmethod
    def single(cls) -> StandaloneWorld:
        """Of the only rank."""
        return cls(0, 1, 0, dist.HashStore())


@contextmanager
def connected(
    world: StandaloneWorld, device: Literal["cpu", "cuda"] = "cpu", threads: int = 1, tp: int = 1
) -> Iterator[tuple[Platform, Groups]]:
    """The platform, while there are torch's and megatron-core's groups of ranks of which `tp` hold a model together.
    Collective.

    threads: of OMP, MKL and torch.

    Raises UnsupportedPlatform, as where there is no such device.
    """
    platform = select(JobConfig(device=device, threads_per_rank=threads), world.local_rank)
    layout = TrainingLayout(tp=tp)
    check_divides(world.size, layout)
    dist.init_process_group(
        platform.backend, store=world.store, rank=world.rank, world_size=world.size, timeout=COLLECTIVE_TIMEOUT
    )
    try:
        yield platform, cut(layout, COLLECTIVE_TIMEOUT)
    except BaseException:
        if world.size == 1:  # else the end of NCCL's groups would wait for ranks that do something else
            disconnect()
        raise
    disconnect()
