"""NVIDIA GPUs: one device per rank, NCCL, megatron-core unpatched."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, cached_property
from types import ModuleType

import torch

from megatron_rl.model.platform.cuda_kernels import CudaKernels
from megatron_rl.model.platform.device import AnyModule, Device, DeviceUse, Kernels, UnsupportedPlatform
from megatron_rl.model.platform.implementation import UNASKED, Implementation
from megatron_rl.model.platform.transport import on_stream
from megatron_rl.recipe.cards import find_card, without_fp8

MEMORY_EVENTS = 200_000
"""Newest allocations and frees in a snapshot of memory: some 100 MB with their stacks."""


class CudaDevice(Device):
    backend = "nccl"
    transfers_beside_collectives = False

    def __init__(self, *, local_rank: int, threads: int, made_of: Implementation = UNASKED) -> None:
        if not torch.cuda.is_available():
            raise UnsupportedPlatform("job.device is cuda but torch sees no GPU: use a GPU node or job.device=cpu")
        if local_rank >= torch.cuda.device_count():
            raise UnsupportedPlatform(
                f"rank {local_rank} of this node has no GPU: torch sees {torch.cuda.device_count()}, and every node "
                "needs job.gpus_per_node of them"
            )
        # NCCL registers buffers of graphs by addresses, which expandable segments do not have.
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision("highest")  # NVIDIA's image allows TF32 for fp32
        self.device = torch.device("cuda", local_rank)
        torch.cuda.set_device(self.device)
        if made_of.fp8 is not None:
            name, capability = torch.cuda.get_device_name(self.device), torch.cuda.get_device_capability(self.device)
            if against := without_fp8(name, capability):
                raise UnsupportedPlatform(f"training.fp8 is {made_of.fp8}, but {against}")
        self.kernels: Kernels = CudaKernels(self.device, made_of)

    def build(self, make: Callable[[], AnyModule], dtype: torch.dtype) -> AnyModule:
        from megatron_rl.model.platform.megatron_patches import patch_multi_tensor

        patch_multi_tensor()
        return make().to(device=self.device, dtype=dtype)

    def host_memory(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def release_memory(self) -> None:
        torch.cuda.empty_cache()  # torch's allocator keeps what tensors have freed

    @cached_property
    def _beside(self) -> torch.cuda.Stream:
        """One stream for all work beside: torch caches freed memory per stream."""
        return torch.cuda.Stream(self.device)

    def beside(self) -> AbstractContextManager[None]:
        return on_stream(self._beside)

    def watch_memory(self, watch: bool) -> None:
        torch.cuda.memory._record_memory_history("all" if watch else None, max_entries=MEMORY_EVENTS)

    def memory_snapshot(self) -> bytes | None:
        return pickle.dumps(torch.cuda.memory._snapshot())

    def device_use(self) -> DeviceUse | None:
        peak = torch.cuda.max_memory_allocated(self.device)  # the allocator's count, which needs no device work
        torch.cuda.reset_peak_memory_stats(self.device)
        return DeviceUse(peak, _power(self.device))

    def peak_flops(self, dtype: str) -> float | None:
        name = torch.cuda.get_device_name(self.device)
        if dtype != "bf16" or "MIG" in name:  # a slice of a device
            return None
        card = find_card(name)
        return card.bf16_flops if card else None

    def seed(self, seed: int) -> None:
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        torch.manual_seed(seed)
        # Seed as the first rank: every rank draws the whole weights of a random model (models.build_models).
        model_parallel_cuda_manual_seed(seed, tp_rank=0, ep_rank=0, etp_rank=0)

    def rng_state(self) -> dict[str, torch.Tensor]:
        return {**super().rng_state(), "cuda": torch.cuda.get_rng_state(self.device)}

    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        super().set_rng_state(state)
        if "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self.device)


@cache
def _nvml() -> ModuleType | None:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def _power(device: torch.device) -> float | None:
    nvml = _nvml()
    if nvml is None:
        return None
    try:
        return torch.cuda.power_draw(device) / 1000
    except (RuntimeError, nvml.NVMLError):
        return None
