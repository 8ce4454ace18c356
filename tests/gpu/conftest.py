"""Tests here use the GPU's platform, and nothing of the CPU's is patched in their process. suite.py runs them in
order."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_helpers import DEVICE


@pytest.fixture(scope="session")
def platform() -> Any:
    from megatron_rl.model.platform.select import select
    from megatron_rl.recipe.job import JobConfig
    from megatron_rl.recipe.model import too_small_head

    chosen = select(JobConfig(device=DEVICE, gpus_per_node=1, threads_per_rank=4))
    find = chosen.kernels.linears

    def linears(config: Any) -> Any:
        """Refuse on a CPU too what a GPU cannot compute."""
        assert too_small_head(config.kv_channels) is None
        return find(config)

    chosen.kernels.linears = linears
    return chosen
