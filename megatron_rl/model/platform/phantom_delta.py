"""Kernels of a gated delta net on a device that does not exist: with the shapes of those of a GPU, and the tensors that
these keep for the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_rl.model.platform.delta_rule import CHUNK
from megatron_rl.model.platform.fla_delta import FlaDelta


class _Rule(torch.autograd.Function):
    """Allocates what chunk_gated_delta_rule of fla-core 0.6 does, by the names there. It keeps its inputs, queries and
    keys normalised, and a matrix of each chunk and head."""

    @staticmethod
    def forward(ctx: Any, states: int, *inputs: Tensor) -> Tensor:
        """states: chunks of all sequences."""
        _query, key, value = inputs[:3]
        ctx.save_for_backward(*inputs, value.new_empty(*value.shape[:3], CHUNK))
        ctx.states = states
        _w, _u, _v_new, _h = _of_chunks(key, value, states)
        return torch.empty_like(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, _ = ctx.saved_tensors
        key, value = inputs[1:3]
        _w, _u, _v_new, _h = _of_chunks(key, value, ctx.states)
        _dw, _dv, _dv2, _dh = _of_chunks(key, value, ctx.states)
        _dk2 = torch.empty_like(key)
        return (None, *map(torch.empty_like, inputs))


def _of_chunks(key: Tensor, value: Tensor, states: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Three tensors of all tokens, and a state of each chunk and head."""
    state = value.new_empty(states, value.shape[2], key.shape[3], value.shape[3])
    return torch.empty_like(key), torch.empty_like(value), torch.empty_like(value), state


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
    states = value.shape[1] // CHUNK + sizes[0]  # at most: the last chunk of a sequence may be short
    out: Tensor = _Rule.apply(states, *inputs)
    return out, value.new_empty(sizes, dtype=torch.float32)


def _causal_conv1d(tokens: Tensor, weight: Tensor, **_: Any) -> Tensor:
    out: Tensor = _Convolution.apply(tokens, weight)
    return out


def phantom_delta() -> FlaDelta:
    return FlaDelta(_chunk_gated_delta_rule, _causal_conv1d)
