"""Tests here use the GPU's platform, and nothing of the CPU's is patched in their process. suite.py runs them in
order."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_helpers import DEVICE


@pytest.fixture(scope="session")
def platform() -> Any:
    from megatron_rl.platform.select import select
    from megatron_rl.rank.config import JobConfig

    return select(JobConfig(device=DEVICE, gpus_per_node=1, threads_per_rank=4))
