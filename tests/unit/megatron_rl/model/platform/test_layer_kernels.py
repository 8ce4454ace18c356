"""Kernels between the products of a layer agree with their formulas in float64. Triton's run in its interpreter, on a
CPU."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from layer_kernel_checks import check_norm, check_rotation, check_sum_and_its_norm, check_swiglu

from megatron_rl.model.platform.cuda_kernels import find_layer_kernels
from megatron_rl.model.platform.device import UnsupportedPlatform
from megatron_rl.model.platform.layer_kernels import LayerKernels, TorchKernels

MODULE = "megatron_rl.model.platform.triton_kernels"
CPU = torch.device("cpu")
TOKENS = 5


@pytest.fixture(params=["torch", "triton"])
def kernels(request: pytest.FixtureRequest) -> LayerKernels:
    if request.param == "torch":
        return TorchKernels("a test")
    pytest.importorskip("triton")
    return importlib.import_module(MODULE).TritonKernels()


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    dtype: torch.dtype = request.param
    return dtype


@pytest.mark.parametrize("size", [40, 64, 1000])
def test_norm(kernels: LayerKernels, dtype: torch.dtype, size: int) -> None:
    check_norm(kernels, dtype, CPU, TOKENS, size)


@pytest.mark.parametrize("size", [40, 64, 1000])
def test_sum_and_its_norm(kernels: LayerKernels, dtype: torch.dtype, size: int) -> None:
    check_sum_and_its_norm(kernels, dtype, CPU, TOKENS, size)


@pytest.mark.parametrize("size", [8, 1030])
def test_swiglu(kernels: LayerKernels, dtype: torch.dtype, size: int) -> None:
    check_swiglu(kernels, dtype, CPU, TOKENS, size)


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("in_cache", [False, True])
def test_rotation(kernels: LayerKernels, dtype: torch.dtype, with_norms: bool, in_cache: bool) -> None:
    check_rotation(
        kernels, dtype, CPU, TOKENS, kv_heads=2, queries=3, head_size=24, with_norms=with_norms, in_cache=in_cache
    )


def test_without_triton_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    with pytest.raises(UnsupportedPlatform, match="Triton, which every build of torch for CUDA brings"):
        find_layer_kernels()
