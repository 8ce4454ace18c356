"""Bytes that a rank of a replica keeps of the tokens that it has seen. Pure."""

from __future__ import annotations

from typing import NamedTuple

from megatron_rl.recipe.layer_sizes import convolved, layer_kinds
from megatron_rl.recipe.model import ModelConfig

STATE_BYTES = 4
"""Bytes of a number in the state of a delta net, which is fp32 in every engine."""


class CacheBytes(NamedTuple):
    token: int
    sequence: int
    """Bytes whatever the number of tokens: states, and windows of which no more is kept."""


def cache_bytes(
    model: ModelConfig, size: int, tp: int, longest: int, by_vllm: bool, layers: range | None = None
) -> CacheBytes:
    """Add up the layers of one rank.

    vLLM caches the short vector of latent attention, which tensor-parallel ranks do not split, and of a window no more
    than its tokens. mrl's own engine caches keys and values of all heads and tokens; smaller values take the room of
    keys.

    Args:
        size: bytes of a number.
        longest: tokens of the longest sequence.
        by_vllm: whether vLLM generates.
        layers: numbers, from 0; default: all.
    """
    latent, net, token, sequence = model.latent_attention, model.delta_net, 0, 0
    heads = -(-(model.num_attention_heads if latent else model.num_query_groups) // tp)
    each = size * heads * 2 * model.head_size
    if latent and by_vllm:
        each = size * (latent.kv_lora_rank + latent.qk_rope_head_dim)
    for kind, count in layer_kinds(model, layers).items():
        if kind.attention == "linear_attention" and net:
            state = net.value_heads * net.key_head_dim * net.value_head_dim
            sequence += count * (STATE_BYTES * state + size * (net.conv_kernel - 1) * convolved(model)) // tp
        elif kind.attention == "sliding_attention" and by_vllm:
            sequence += count * each * min(longest, model.sliding_window or longest)
        else:
            token += count * each
    return CacheBytes(token, sequence)
