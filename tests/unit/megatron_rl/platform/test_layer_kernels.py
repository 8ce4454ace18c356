"""Kernels between the products of a layer agree with their formulas in float64. Triton's run in its interpreter, on a
CPU."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_kernel_checks import check_norm, check_rotation, check_sum_and_its_norm, check_swiglu

from megatron_rl.platform.cuda import find_layer_kernels
from megatron_rl.platform.layer_kernels import LayerKernels, TorchKernels

MODULE = "megatron_rl.platform.triton_kernels"
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


def test_without_triton_the_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    found: Any = find_layer_kernels()
    assert isinstance(found, TorchKernels)
    assert found.name.startswith("torch operators (Triton cannot be imported: ")


COMPILED = r"""
import re
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from megatron_rl.platform import triton_kernels as kernels

B = "*bf16"
NORM = {"hidden": B, "other": B, "weight": B, "total": B, "normed": B, "size": "i32", "eps": "fp32"}
ROTATION = {name: B for name in ("heads", "cosines", "sines", "query_weight", "key_weight", "query", "keys", "values")}
ROTATION |= {"slots": "*i64", "queries": "i32", "kv_heads": "i32", "size": "i32", "eps": "fp32"}
for kernel, parameters, constants in (
    (kernels._add_and_norm, NORM, {"ADDS": True, "BLOCK": 8192}),
    (kernels._swiglu, {"gate_and_value": B, "out": B, "size": "i32"}, {"BLOCK": kernels.ACTIVATED}),
    (kernels._rotate, ROTATION, {"NORMS": True, "SLOTS": True, "BLOCK": 128}),
):
    source = ASTSource(kernel, parameters | dict.fromkeys(constants, "constexpr"), constants)
    compiled = compile(source, GPUTarget("cuda", 90, 32)).asm
    print(bool(compiled["cubin"]), *{*re.findall(r"cvt[.\w]*bf16.f32", compiled["ptx"])})
"""


def test_kernels_compile_for_an_h100(tmp_path: Path) -> None:
    """Triton's wheels contain the compiler for NVIDIA's GPUs, which needs no GPU. Compiled kernels round to the nearest
    number of bf16, while the interpreter cuts off."""
    pytest.importorskip("triton.backends.nvidia")
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout.splitlines() == ["True cvt.rn.bf16.f32"] * 3, done.stderr
