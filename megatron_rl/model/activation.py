"""Gated activations of feed-forward networks and experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn.functional import gelu, silu

from megatron_rl.recipe.model import ModelConfig

SIGMOID_SLOPE = 1.702
"""Slope of the sigmoid in gpt-oss's activation (alpha in its reference), the usual approximation of GELU."""


def swiglu(gate_and_value: Tensor) -> Tensor:
    """[..., 2 * ffn] -> [..., ffn] (arXiv 2002.05202)."""
    gate, value = gate_and_value.chunk(2, dim=-1)
    return silu(gate) * value


def geglu(gate_and_value: Tensor) -> Tensor:
    """[..., 2 * ffn] -> [..., ffn] (arXiv 2002.05202), with the approximation of GELU by tanh."""
    gate, value = gate_and_value.chunk(2, dim=-1)
    return gelu_tanh(gate) * value


def clamped_swiglu(gate_and_value: Tensor, limit: float) -> Tensor:
    """[..., 2 * ffn] -> [..., ffn], as in gpt-oss: see `model.swiglu_limit`."""
    gate, value = gate_and_value.chunk(2, dim=-1)
    return quick_gelu(gate.clamp(max=limit)) * (value.clamp(-limit, limit) + 1)


def gelu_tanh(gate: Tensor) -> Tensor:
    return gelu(gate, approximate="tanh")


def quick_gelu(gate: Tensor) -> Tensor:
    return gate * torch.sigmoid(SIGMOID_SLOPE * gate)


def activation_fields(model: ModelConfig) -> dict[str, Any]:
    """Fields of TransformerConfig with which megatron-core's own MLP computes the model's activation."""
    if model.swiglu_limit is not None:
        return {
            "activation_func": quick_gelu,
            "activation_func_clamp_value": model.swiglu_limit,
            "glu_linear_offset": 1.0,
        }
    return {"activation_func": silu if model.activation == "silu" else gelu_tanh}


def gated_activation(config: TransformerConfig) -> Callable[[Tensor], Tensor]:
    """Function of `activation_fields`, of gate and up projections [..., 2 * ffn] to [..., ffn]."""
    if config.activation_func_clamp_value is not None:
        return partial(clamped_swiglu, limit=config.activation_func_clamp_value)
    return swiglu if config.activation_func is silu else geglu
