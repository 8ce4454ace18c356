"""Kernels between the products of a layer agree with their formulas in float64, at the sizes of one rank of Qwen2.5-32B
under TP 8; times of Triton's beside torch's operators. On a CPU Triton's run in its interpreter."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_helpers import DEVICE, NEEDS_CUDA, NEEDS_GPU, replayed
from layer_kernel_checks import EPS, check_norm, check_rotation, check_sum_and_its_norm, check_swiglu, random

from megatron_rl.model.platform.cuda_kernels import find_layer_kernels
from megatron_rl.model.platform.layer_kernels import LayerKernels, Slots, TorchKernels

pytestmark = NEEDS_GPU

GPU = torch.device(DEVICE, 0 if DEVICE == "cuda" else None)
HIDDEN, FFN, QUERIES, HEAD_SIZE = 5120, 3456, 5, 128
ROWS = [1, 8, 300] if DEVICE == "cuda" else [3]


@pytest.fixture(params=["torch", "triton"])
def kernels(request: pytest.FixtureRequest) -> LayerKernels:
    return TorchKernels("a test") if request.param == "torch" else triton_kernels()


def triton_kernels() -> LayerKernels:
    if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton needs a GPU or TRITON_INTERPRET=1")
    return find_layer_kernels()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("rows", ROWS)
def test_kernels_agree_with_their_formulas(kernels: LayerKernels, rows: int, dtype: torch.dtype) -> None:
    check_norm(kernels, dtype, GPU, rows, HIDDEN)
    check_sum_and_its_norm(kernels, dtype, GPU, rows, HIDDEN)
    check_swiglu(kernels, dtype, GPU, rows, FFN)
    for with_norms, in_cache in ((False, True), (True, True), (True, False)):
        check_rotation(
            kernels,
            dtype,
            GPU,
            rows,
            kv_heads=1,
            queries=QUERIES,
            head_size=HEAD_SIZE,
            with_norms=with_norms,
            in_cache=in_cache,
        )


def calls(kernels: LayerKernels, rows: int) -> dict[str, Callable[[], Any]]:
    """Each kernel on bf16 tensors of a decode step, the same ones for the same rows."""

    def drawn(*shape: int) -> torch.Tensor:
        return random(*shape, dtype=torch.bfloat16, device=GPU)

    hidden, other, weight, wide = drawn(rows, HIDDEN), drawn(rows, HIDDEN), drawn(HIDDEN), drawn(rows, 2 * FFN)
    heads, turns = drawn(rows, (QUERIES + 2) * HEAD_SIZE), drawn(rows, 1, HEAD_SIZE)
    slots = Slots(*drawn(2, rows, 1, HEAD_SIZE), torch.arange(rows, device=GPU))
    return {
        "add_and_norm": lambda: kernels.add_and_norm(hidden, other, weight, EPS),
        "swiglu": lambda: kernels.swiglu(wide),
        "rotate": lambda: kernels.rotate(heads, turns, turns, 1, None, slots),
    }


@NEEDS_CUDA
@pytest.mark.parametrize("rows", [1, 64])
def test_replayed_kernels_give_the_results_of_called_ones(
    kernels: LayerKernels, record_property: Callable[[str, object], None], rows: int
) -> None:
    """Their times are figures of the report; a decode step calls each of the three once or twice a layer."""
    for name, call in calls(kernels, rows).items():
        recorded, microseconds = replayed(call)
        torch.testing.assert_close(recorded, call(), rtol=0, atol=0)
        record_property(f"{name} us, {rows} rows, {kernels.name}", round(microseconds, 2))
