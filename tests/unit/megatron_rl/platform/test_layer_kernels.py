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
from torch import Tensor

from megatron_rl.platform.cuda import find_layer_kernels
from megatron_rl.platform.layer_kernels import LayerKernels, Norms, Slots, TorchKernels

MODULE = "megatron_rl.platform.triton_kernels"
TOKENS, KV_HEADS, QUERIES = 5, 2, 3
EPS = 1e-5


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


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded(found: Tensor, exact: Tensor, roundings: int = 1) -> None:
    """roundings: times that a result is rounded to its dtype, with an error of a unit of its last place at most."""
    assert exact.dtype is torch.float64
    error = torch.finfo(found.dtype).eps if found.dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), exact, rtol=roundings * error, atol=roundings * error)


def normed(hidden: Tensor, weight: Tensor) -> Tensor:
    hidden = hidden.double()
    return hidden / (hidden.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("size", [40, 64, 1000])
def test_norm(kernels: LayerKernels, dtype: torch.dtype, size: int) -> None:
    hidden, weight = random(TOKENS, size, dtype=dtype), random(size, dtype=dtype, seed=1)
    assert_rounded(kernels.norm(hidden, weight, EPS), normed(hidden, weight))


@pytest.mark.parametrize("size", [40, 64, 1000])
def test_sum_and_its_norm(kernels: LayerKernels, dtype: torch.dtype, size: int) -> None:
    """The norm is that of the rounded sum, which the next layer adds to."""
    hidden, other, weight = (
        random(*shape, size, dtype=dtype, seed=seed) for seed, shape in enumerate([(5,), (5,), ()])
    )
    before = hidden.clone()
    total, found = kernels.add_and_norm(hidden, other, weight, EPS)
    assert_rounded(total, hidden.double() + other.double())
    assert_rounded(found, normed(total, weight))
    assert torch.equal(hidden, before)


@pytest.mark.parametrize("size", [8, 1030])
def test_swiglu(kernels: LayerKernels, dtype: torch.dtype, size: int) -> None:
    gate_and_value = 3 * random(TOKENS, 2 * size, dtype=dtype)
    gate, value = gate_and_value.double().chunk(2, dim=1)
    assert_rounded(kernels.swiglu(gate_and_value), gate / (1 + (-gate).exp()) * value, 2)


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("in_cache", [False, True])
def test_rotation(kernels: LayerKernels, dtype: torch.dtype, with_norms: bool, in_cache: bool) -> None:
    head_size = 24
    heads = random(TOKENS, KV_HEADS * (QUERIES + 2) * head_size, dtype=dtype)
    angles = random(TOKENS, head_size // 2, dtype=torch.float64, seed=1)
    cosines = torch.cat((angles.cos(), angles.cos()), dim=1)[:, None].to(dtype)
    sines = torch.cat((-angles.sin(), angles.sin()), dim=1)[:, None].to(dtype)
    norms = Norms(*(random(head_size, dtype=dtype, seed=seed) for seed in (2, 3)), EPS) if with_norms else None
    keys, values = random(2, 9, KV_HEADS, head_size, dtype=dtype, seed=4)
    others, index = [1, 3, 5, 8], torch.tensor([4, 0, 7, 2, 6])
    untouched = keys[others].clone(), values[others].clone()

    slots = Slots(keys, values, index) if in_cache else None
    query, key, value = kernels.rotate(heads, cosines, sines, KV_HEADS, norms, slots)
    if in_cache:
        key, value = keys[index], values[index]
        assert torch.equal(keys[others], untouched[0]) and torch.equal(values[others], untouched[1])

    groups = heads.view(TOKENS, KV_HEADS, QUERIES + 2, head_size)
    for head in range(KV_HEADS * QUERIES):
        exact = turned(groups[:, head // QUERIES, head % QUERIES], cosines, sines, norms and norms.query)
        assert_rounded(query[:, head], exact, 4)
    for group in range(KV_HEADS):
        assert_rounded(key[:, group], turned(groups[:, group, QUERIES], cosines, sines, norms and norms.key), 4)
        assert torch.equal(value[:, group], groups[:, group, QUERIES + 1])


def turned(head: Tensor, cosines: Tensor, sines: Tensor, norm: Tensor | None) -> Tensor:
    """Rotate the pairs (i, i + half) of a head, [tokens, head_size], one by one, in float64."""
    head = head.double() if norm is None else normed(head, norm)
    half = head.shape[1] // 2
    cosine, sine = cosines[:, 0, :half].double(), sines[:, 0, half:].double()
    first, second = head[:, :half], head[:, half:]
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=1)


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
