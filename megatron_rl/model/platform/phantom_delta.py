"""Kernels of a gated delta net on a device that does not exist: with the shapes of those of a GPU, and the tensors that
these keep for the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_rl.model.platform.delta_rule import CHUNK
from megatron_rl.model.platform.fla_delta import FlaDelta


class _Rule(torch.autograd.Function):
    """Keeps its inputs, and a matrix of each chunk and head."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        value = inputs[2]
        ctx.save_for_backward(*inputs, value.new_empty(*value.shape[:3], CHUNK))
        return torch.empty_like(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        *inputs, _ = ctx.saved_tensors
        return tuple(map(torch.empty_like, inputs))


class _Convolution(torch.autograd.Function):
    """Keeps its inputs."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        return torch.empty_like(tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors))


def _chunk_gated_delta_rule(*inputs: Tensor, cu_seqlens: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    key, value = inputs[1:3]
    sizes = len(cu_seqlens) - 1, value.shape[2], key.shape[3], value.shape[3]
    out: Tensor = _Rule.apply(*inputs)
    return out, value.new_empty(sizes, dtype=torch.float32)


def _causal_conv1d(tokens: Tensor, weight: Tensor, **_: Any) -> Tensor:
    out: Tensor = _Convolution.apply(tokens, weight)
    return out


def phantom_delta() -> FlaDelta:
    return FlaDelta(_chunk_gated_delta_rule, _causal_conv1d)
