"""megatron-core's transformer layer for packed tokens.

Modules, names and sharded state are megatron-core's; only `forward` differs. Its own leads every token past caches,
cross-attention, offloading and communication that are not in use here, which took a sixth of the demo's step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_rl.model.config import Recompute
from megatron_rl.platform.api import Platform
from megatron_rl.platform.attention import Layout


def packed_layer_spec(config: TransformerConfig, recompute: Recompute, platform: Platform) -> Any:
    """What GPTModel builds each of its layers from."""
    spec: Any = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    spec.module = RecomputedLayer if recompute == "full" else PackedLayer
    attention, mlp = spec.submodules.self_attention, spec.submodules.mlp
    attention.module = RecomputedAttention if recompute == "selective" else PackedAttention
    attention.submodules.core_attention = NoCoreAttention
    if linears := platform.linears(config):
        # A ModuleSpec in 0.16.1, a partial builder in 0.19.2.
        of_mlp = mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules
        attention.submodules.linear_qkv = of_mlp.linear_fc1 = linears[0]
        attention.submodules.linear_proj = of_mlp.linear_fc2 = linears[1]
    return spec


@dataclass(frozen=True, slots=True)
class Rotation:
    """Turns queries and keys by their positions (RoPE, arXiv 2104.09864), both at once and with the same sines in
    every layer, where megatron-core would take one after the other and compute the sines again."""

    cosines: Tensor
    """[tokens, 1, head_size]"""
    sines: Tensor
    """[tokens, 1, head_size], those of the first half negated."""

    def turn(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Each [tokens, heads, head_size]."""
        both = torch.cat((query, key), dim=1)
        half = both.shape[-1] // 2
        both = torch.addcmul(both * self.cosines, both.roll(half, dims=-1), self.sines)
        query, key = both.split((query.shape[1], key.shape[1]), dim=1)
        return query, key


class PackedLayer(TransformerLayer):
    def forward(
        self, hidden_states: Tensor, *, rotary_pos_emb: Rotation, packed_seq_params: Layout, **_: Any
    ) -> tuple[Tensor, None]:
        """[tokens, 1, hidden] -> the same, and no context for cross-attention.

        The names are those under which megatron-core's TransformerBlock hands things on to its layers.
        """
        attended = self.self_attention(self.input_layernorm(hidden_states), rotary_pos_emb, packed_seq_params)
        hidden_states = hidden_states + attended
        out, _bias = self.mlp(self.pre_mlp_layernorm(hidden_states))
        return hidden_states + out, None


class PackedAttention(SelfAttention):
    def forward(self, hidden: Tensor, rotation: Rotation, layout: Layout) -> Tensor:
        """[tokens, 1, hidden] -> the same."""
        query, key, value = (x.squeeze(1) for x in self.get_query_key_value_tensors(hidden))
        out, _bias = self.linear_proj(self.attend(query, key, value, rotation, layout)[:, None])
        return out

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation, layout: Layout) -> Tensor:
        query, key = rotation.turn(query, key)
        return layout.attend(self.layer_number, query, key, value)


class RecomputedLayer(PackedLayer):
    """Keeps its input alone for the backward pass."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return _recomputed(super().forward, *args, **kwargs)


class RecomputedAttention(PackedAttention):
    """Keeps queries, keys and values for the backward pass, not what attention makes of them."""

    def attend(self, *args: Any) -> Tensor:
        return _recomputed(super().attend, *args)


def _recomputed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """torch's checkpoint, not megatron-core's, which is about the random numbers of dropout: there is none."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


class NoCoreAttention(torch.nn.Module):
    """Fills megatron-core's slot: who attends to whom is the layout's business."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
