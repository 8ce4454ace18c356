"""One token a row through all layers of a policy, where one rank has all of them and a CPU computes them.

Of small products Python's way to each operator is a large part. So here are the same weights without megatron-core's
modules around them, in as few operators as there are.
"""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn.functional import linear, pad, rms_norm, silu

from megatron_rl.model.layers import Norm, Rotation
from megatron_rl.platform.api import Platform
from megatron_rl.platform.attention import Layout


def decodes_whole(policy: GPTModel, platform: Platform) -> bool:
    """Whether `decode` is for this policy: nothing of it is another rank's, and each row is computed by itself."""
    return (
        platform.computes_on_host
        and policy.config.num_moe_experts is None
        and policy.pg_collection.tp.size() == policy.pg_collection.pp.size() == 1
    )


def decode(policy: GPTModel, tokens: Tensor, rotation: Rotation, layout: Layout, rows: int) -> Tensor:
    """What the output layer makes logits of. It differs from the training forward by rounding.

    tokens [tokens], the first `rows` of which are those of the layout and the rotation -> [tokens, hidden]
    """
    hidden = policy.embedding.word_embeddings.weight.index_select(0, tokens)
    for layer in policy.decoder.layers:
        normed = _normed(hidden, layer.input_layernorm)
        attended = _attended(layer, normed, rotation, layout, rows)
        hidden = torch.addmm(hidden, attended, layer.self_attention.linear_proj.weight.t())
        gate_and_value = linear(_normed(hidden, layer.pre_mlp_layernorm), layer.mlp.linear_fc1.weight)
        gate, value = gate_and_value.chunk(2, dim=-1)
        hidden = torch.addmm(hidden, silu(gate).mul_(value), layer.mlp.linear_fc2.weight.t())
    return _normed(hidden, policy.decoder.final_layernorm)


def _attended(layer: TransformerLayer, normed: Tensor, rotation: Rotation, layout: Layout, rows: int) -> Tensor:
    """[tokens, hidden] -> [tokens, heads * head_size]"""
    attention = layer.self_attention
    groups, head_size = attention.num_query_groups_per_partition, attention.hidden_size_per_attention_head
    # The heads of each group: its queries', its key's, its value's.
    projected = linear(normed, attention.linear_qkv.weight, attention.linear_qkv.bias)
    heads = projected.view(len(normed), groups, -1, head_size)[:rows]
    turned = heads[:, :, :-1]
    if isinstance(attention.q_layernorm, Norm):
        query, key = turned.split((turned.shape[2] - 1, 1), dim=2)
        turned = torch.cat((_normed(query, attention.q_layernorm), _normed(key, attention.k_layernorm)), dim=2)
    turned = rotation.turned(turned.flatten(1, 2)).view_as(turned)
    attended = layout.attend(
        layer.layer_number, turned[:, :, :-1].reshape(rows, -1, head_size), turned[:, :, -1], heads[:, :, -1]
    )
    return attended if rows == len(normed) else pad(attended, (0, 0, 0, len(normed) - rows))


def _normed(hidden: Tensor, norm: Norm) -> Tensor:
    return rms_norm(hidden, norm.normalized_shape, norm.weight, norm.eps)
