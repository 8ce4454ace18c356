"""The groups of a process that is no rank of a run: it has all of a model to itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.platform.api import Platform
from megatron_rl.platform.select import select
from megatron_rl.rank.config import JobConfig


@contextmanager
def alone(device: Literal["cpu", "cuda"] = "cpu", threads: int = 1) -> Iterator[Platform]:
    """The platform, while there are torch's and megatron-core's groups, of this one process.

    threads: of OMP, MKL and torch.

    Raises UnsupportedPlatform, as where there is no such device.
    """
    platform = select(JobConfig(device=device, threads_per_rank=threads))
    dist.init_process_group(platform.backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        yield platform
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
