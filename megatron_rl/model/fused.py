"""Generation on a GPU with a policy's own weights, and few kernels.

A decode step of a few rows consists of hundreds of short kernels. Each costs the GPU some microseconds beside
its memory traffic. Layers that also train take 20; here a layer takes eleven, or twelve if keys are split:

    qkv | rotation, cache | attention | joining splits | projection | sum over ranks | sum, norm
    gate and value | activation | output | sum over ranks | sum, norm

The weights are those of the training layers, referenced and in the model's dtype, whatever multiplies them in training:
Transformer Engine's linears, possibly in FP8, are not used. Results differ from the training forward by rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn.functional import linear

from megatron_rl.model.norm import Norm
from megatron_rl.model.platform.attention import Layout
from megatron_rl.model.platform.layer_kernels import LayerKernels, Norms
from megatron_rl.model.platform.paged_attention import InPlaceLayout
from megatron_rl.model.rotation import Rotation
from megatron_rl.recipe.model import ModelConfig


def why_not_fused(policy: GPTModel, model: ModelConfig) -> str | None:
    """Return why `FusedPolicy` does not support a policy on its GPU; None if it does."""
    if model.num_experts is not None:
        return "the model has experts"
    if (special := model.special) is not None:
        return f"the model has {special}"
    if policy.adapters is not None:
        return "the model has adapters"
    tensor_parallel = policy.pg_collection.tp.size()
    if policy.pg_collection.pp.size() > 1 or policy.config.sequence_parallel:
        return "the engine has the layout of the training"
    if policy.config.num_query_groups < tensor_parallel:
        return f"{tensor_parallel} ranks share {policy.config.num_query_groups} key/value heads"
    return None


@dataclass(frozen=True, slots=True)
class FusedLayer:
    number: int
    norm: Tensor  # [hidden]
    qkv: Tensor  # [(heads + 2 * kv_heads) * head_size, hidden]
    qkv_bias: Tensor | None
    head_norms: Norms | None
    proj: Tensor  # [hidden, heads * head_size]
    mlp_norm: Tensor  # [hidden]
    gate_and_value: Tensor  # [2 * ffn, hidden]
    out: Tensor  # [hidden, ffn]


class FusedPolicy:
    """The weights of a policy that `why_not_fused` accepts. They may change in place, and move."""

    def __init__(self, policy: GPTModel, kernels: LayerKernels) -> None:
        self._policy = policy
        self._kernels = kernels
        self._rotation = policy.rotations.of_all
        self._eps: float = policy.config.layernorm_epsilon
        self._kv_heads: int = policy.decoder.layers[0].self_attention.num_query_groups_per_partition
        self._layers = [_layer(layer, self._eps) for layer in policy.decoder.layers]
        final: Tensor = policy.decoder.final_layernorm.weight
        self._next_norms = [*(layer.norm for layer in self._layers[1:]), final]

    def logits(self, tokens: Tensor, positions: Tensor, layout: Layout, select: Tensor | None = None) -> Tensor:
        kernels, eps = self._kernels, self._eps
        hidden = self._policy.embedding(tokens[None], positions[None])[:, 0].contiguous()
        rotation = self._rotation.at(positions)
        normed = kernels.norm(hidden, self._layers[0].norm, eps)
        for layer, next_norm in zip(self._layers, self._next_norms, strict=True):
            attended = self._attention(layer, normed, rotation, layout)
            hidden, normed = kernels.add_and_norm(hidden, attended, layer.mlp_norm, eps)
            del attended  # else it would stay until the next layer's
            hidden, normed = kernels.add_and_norm(hidden, self._feed_forward(layer, normed), next_norm, eps)
        of_rank: Tensor = self._policy.output().logits(normed if select is None else normed.index_select(0, select))
        return of_rank

    def _summed(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Multiply and sum over the tensor-parallel ranks: [rows, inputs], [outputs, inputs] -> [rows, outputs]."""
        out = linear(rows, weight)
        if (ranks := self._policy.pg_collection.tp).size() > 1:
            dist.all_reduce(out, group=ranks)
        return out

    def _attention(self, layer: FusedLayer, normed: Tensor, rotation: Rotation, layout: Layout) -> Tensor:
        turns = rotation.cosines, rotation.sines, self._kv_heads, layer.head_norms
        heads = linear(normed, layer.qkv, layer.qkv_bias)
        if isinstance(layout, InPlaceLayout) and (slots := layout.slots(layer.number)):
            query, _, _ = self._kernels.rotate(heads, *turns, slots)
            return self._summed(layout.attend_written(layer.number, query), layer.proj)
        attended = layout.attend(layer.number, *self._kernels.rotate(heads, *turns, None))
        return self._summed(attended, layer.proj)

    def _feed_forward(self, layer: FusedLayer, normed: Tensor) -> Tensor:
        return self._summed(self._kernels.swiglu(linear(normed, layer.gate_and_value)), layer.out)


def _layer(layer: TransformerLayer, eps: float) -> FusedLayer:
    attention, mlp = layer.self_attention, layer.mlp
    norms = attention.q_layernorm, attention.k_layernorm
    return FusedLayer(
        layer.layer_number,
        layer.input_layernorm.weight,
        attention.linear_qkv.weight,
        attention.linear_qkv.bias,
        Norms(norms[0].weight, norms[1].weight, eps) if isinstance(norms[0], Norm) else None,
        attention.linear_proj.weight,
        layer.pre_mlp_layernorm.weight,
        mlp.linear_fc1.weight,
        mlp.linear_fc2.weight,
    )
