"""Formulas in float64 of the kernels between the products of a layer, and comparisons of kernels with them, on any
device."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.model.platform.layer_kernels import LayerKernels, Norms, Slots

EPS = 1e-5


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def assert_rounded(found: Tensor, exact: Tensor, roundings: int = 1) -> None:
    """roundings: times that a result is rounded to its dtype, with an error of a unit of its last place at most."""
    assert exact.dtype is torch.float64
    error = torch.finfo(found.dtype).eps if found.dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), exact, rtol=roundings * error, atol=roundings * error)


def normed(hidden: Tensor, weight: Tensor) -> Tensor:
    hidden = hidden.double()
    return hidden / (hidden.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def check_norm(kernels: LayerKernels, dtype: torch.dtype, device: torch.device, tokens: int, size: int) -> None:
    hidden = random(tokens, size, dtype=dtype, device=device)
    weight = random(size, dtype=dtype, device=device, seed=1)
    assert_rounded(kernels.norm(hidden, weight, EPS), normed(hidden, weight))


def check_sum_and_its_norm(
    kernels: LayerKernels, dtype: torch.dtype, device: torch.device, tokens: int, size: int
) -> None:
    """The norm is that of the rounded sum, which the next layer adds to."""
    hidden, other = (random(tokens, size, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    weight = random(size, dtype=dtype, device=device, seed=2)
    before = hidden.clone()
    total, found = kernels.add_and_norm(hidden, other, weight, EPS)
    assert_rounded(total, hidden.double() + other.double())
    assert_rounded(found, normed(total, weight))
    assert torch.equal(hidden, before)


def check_swiglu(kernels: LayerKernels, dtype: torch.dtype, device: torch.device, tokens: int, size: int) -> None:
    gate_and_value = 3 * random(tokens, 2 * size, dtype=dtype, device=device)
    gate, value = gate_and_value.double().chunk(2, dim=1)
    assert_rounded(kernels.swiglu(gate_and_value), gate / (1 + (-gate).exp()) * value, 2)


def check_rotation(
    kernels: LayerKernels,
    dtype: torch.dtype,
    device: torch.device,
    tokens: int,
    *,
    kv_heads: int,
    queries: int,
    head_size: int,
    with_norms: bool,
    in_cache: bool,
) -> None:
    """queries: heads of queries to one head of keys. The cache has twice the slots that are written to."""
    heads = random(tokens, kv_heads * (queries + 2) * head_size, dtype=dtype, device=device)
    angles = random(tokens, head_size // 2, dtype=torch.float64, device=device, seed=1)
    cosines = torch.cat((angles.cos(), angles.cos()), dim=1)[:, None].to(dtype)
    sines = torch.cat((-angles.sin(), angles.sin()), dim=1)[:, None].to(dtype)
    weights = [random(head_size, dtype=dtype, device=device, seed=seed) for seed in (2, 3)]
    norms = Norms(*weights, EPS) if with_norms else None
    keys, values = random(2, 2 * tokens, kv_heads, head_size, dtype=dtype, device=device, seed=4)
    places = torch.randperm(2 * tokens, generator=torch.Generator().manual_seed(5)).to(device)
    index, others = places[:tokens], places[tokens:]
    untouched = keys[others].clone(), values[others].clone()

    slots = Slots(keys, values, index) if in_cache else None
    query, key, value = kernels.rotate(heads, cosines, sines, kv_heads, norms, slots)
    if in_cache:
        key, value = keys[index], values[index]
        assert torch.equal(keys[others], untouched[0]) and torch.equal(values[others], untouched[1])

    groups = heads.view(tokens, kv_heads, queries + 2, head_size)
    for head in range(kv_heads * queries):
        exact = _turned(groups[:, head // queries, head % queries], cosines, sines, norms and norms.query)
        assert_rounded(query[:, head], exact, 4)
    for group in range(kv_heads):
        assert_rounded(key[:, group], _turned(groups[:, group, queries], cosines, sines, norms and norms.key), 4)
        assert torch.equal(value[:, group], groups[:, group, queries + 1])


def _turned(head: Tensor, cosines: Tensor, sines: Tensor, norm: Tensor | None) -> Tensor:
    """Rotate the pairs (i, i + half) of a head, [tokens, head_size], one by one, in float64."""
    head = head.double() if norm is None else normed(head, norm)
    half = head.shape[1] // 2
    cosine, sine = cosines[:, 0, :half].double(), sines[:, 0, half:].double()
    first, second = head[:, :half], head[:, half:]
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=1)
