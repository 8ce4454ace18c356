"""Worlds outside a run: one process that holds a whole model, or a few that share it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

from megatron_rl.model.platform.device import Device
from megatron_rl.model.platform.select import select
from megatron_rl.rank.groups import Groups, check_divides, cut, disconnect
from megatron_rl.recipe.job import JobConfig, TrainingLayout

COLLECTIVE_TIMEOUT = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class StandaloneWorld:
    """A rank's view of a world that belongs to no run."""

    rank: int
    size: int
    local_rank: int
    store: dist.Store

    @classmethod
    def single(cls) -> StandaloneWorld:
        return cls(0, 1, 0, dist.HashStore())


@contextmanager
def connected(
    world: StandaloneWorld, device: Literal["cpu", "cuda"] = "cpu", threads: int = 1, tp: int = 1
) -> Iterator[tuple[Device, Groups]]:
    """Yield the platform and the groups of a world in which `tp` ranks share a model. Collective.

    threads: of OMP, MKL and torch.

    Raises UnsupportedPlatform, for example without the device.
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
        if world.size == 1:  # destroying NCCL's groups would wait for other ranks, which do not take part
            disconnect(platform)
        raise
    disconnect(platform)
