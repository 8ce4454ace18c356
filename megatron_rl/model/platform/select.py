"""Selection of a rank's device.

platform = select(config.job)     # versions checked, patches installed (CPU), device chosen
platform.device, platform.backend, platform.kernels.attention_layout(...)
"""

from __future__ import annotations

import importlib.metadata
import re

from megatron_rl.model.platform.device import Device, UnsupportedPlatform
from megatron_rl.model.platform.implementation import UNASKED, Implementation
from megatron_rl.recipe.job import JobConfig

SUPPORTED_MEGATRON = ((0, 16, 1), (0, 20, 0))  # first supported, first unsupported


def select(job: JobConfig, local_rank: int = 0, made_of: Implementation = UNASKED) -> Device:
    """Return the device that `job.device` asks for.

    made_of: implementation of the layers; on a CPU always megatron-core.

    Raises UnsupportedPlatform for an unsupported megatron-core, a missing patched symbol, or a missing GPU.
    """
    check_megatron_version()
    if job.device == "cpu":
        from megatron_rl.model.platform.cpu import CpuDevice

        return CpuDevice(threads=job.threads_per_rank)
    from megatron_rl.model.platform.cuda import CudaDevice

    return CudaDevice(local_rank=local_rank, threads=job.threads_per_rank, made_of=made_of)


def check_megatron_version() -> None:
    installed = importlib.metadata.version("megatron-core")
    numbers = tuple(int(number) for number in re.findall(r"\d+", installed)[:3])
    first, beyond = SUPPORTED_MEGATRON
    if not first <= numbers < beyond:
        raise UnsupportedPlatform(
            f"megatron-core {installed} is not supported: install "
            f"'megatron-core>={'.'.join(map(str, first))},<{'.'.join(map(str, beyond[:2]))}'"
        )
