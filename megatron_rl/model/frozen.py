"""A policy's weights at one time, laid out for generation by a single rank on a CPU.

For small products the Python overhead of each operator matters, and so does starting its threads. So there are as few
operators as possible: a norm's weight is part of the following product, element-wise operations are fused into
products, and heads leave their product in the order in which they are needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn.functional import pad, rms_norm

from megatron_rl.model.lora import effective_weight
from megatron_rl.model.norm import Norm
from megatron_rl.model.platform import frozen_linear
from megatron_rl.model.platform.attention import Layout
from megatron_rl.model.platform.device import Kernels
from megatron_rl.model.platform.frozen_linear import FrozenLinear, freeze
from megatron_rl.model.rotation import Rotation
from megatron_rl.recipe.model import ModelConfig


def freezes(policy: GPTModel, model: ModelConfig, kernels: Kernels) -> bool:
    """Whether a policy supports `FrozenPolicy`: this rank has all of it, it has plain layers, and each row is computed
    by itself."""
    return (
        kernels.computes_on_host
        and model.special is None
        and model.num_experts is None
        and policy.pg_collection.tp.size() == policy.pg_collection.pp.size() == 1
        and frozen_linear.freezes(policy.config.params_dtype)
    )


@dataclass(frozen=True, slots=True)
class FrozenLayer:
    number: int
    heads: FrozenLinear  # all queries, then all keys, then all values
    head_norms: tuple[Norm, Norm] | None
    proj: FrozenLinear
    gate: FrozenLinear
    value: FrozenLinear
    out: FrozenLinear

    @property
    def linears(self) -> tuple[FrozenLinear, ...]:
        return self.heads, self.proj, self.gate, self.value, self.out


class FrozenPolicy:
    """A copy of the weights. Its results differ from the training forward by rounding."""

    @torch.inference_mode()
    def __init__(self, policy: GPTModel, output: Tensor) -> None:
        """output: weight of the output layer, [tokens, hidden]; its dtype is that of the logits."""
        attention = policy.decoder.layers[0].self_attention
        self._heads: int = attention.num_attention_heads_per_partition
        self._kv_heads: int = attention.num_query_groups_per_partition
        self._head_size: int = attention.hidden_size_per_attention_head
        self._least: float = policy.config.hidden_size * policy.config.layernorm_epsilon
        self._rotations = policy.rotations
        self._embedding: Tensor = policy.embedding.word_embeddings.weight.detach()
        self._layers = [self._layer(layer) for layer in policy.decoder.layers]
        self._output_dtype = output.dtype
        self._output = freeze(_with_norm(policy.decoder.final_layernorm, output))
        linears = [each for layer in self._layers for each in layer.linears] + [self._output]
        self._multiple = max(linear.rows_multiple for linear in linears)

    def _layer(self, layer: TransformerLayer) -> FrozenLayer:
        attention, mlp = layer.self_attention, layer.mlp
        heads = _with_norm(layer.input_layernorm, self._sorted(effective_weight(attention.linear_qkv)))
        bias = attention.linear_qkv.bias
        gate, value = _with_norm(layer.pre_mlp_layernorm, effective_weight(mlp.linear_fc1)).chunk(2)
        norms = attention.q_layernorm, attention.k_layernorm
        return FrozenLayer(
            layer.layer_number,
            freeze(heads, None if bias is None else self._sorted(bias)),
            norms if isinstance(norms[0], Norm) else None,
            freeze(effective_weight(attention.linear_proj)),
            freeze(gate),
            freeze(value),
            freeze(effective_weight(mlp.linear_fc2)),
        )

    def _sorted(self, heads: Tensor) -> Tensor:
        """Reorder (queries, key, value) of each group -> all queries, all keys, all values."""
        of_groups = heads.unflatten(0, (self._kv_heads, -1, self._head_size))
        parts = of_groups.split((of_groups.shape[1] - 2, 1, 1), dim=1)
        return torch.cat([part.flatten(0, 2) for part in parts])

    def logits(self, tokens: Tensor, positions: Tensor, layout: Layout, select: Tensor | None = None) -> Tensor:
        count = tokens.shape[0]
        filling = -count % self._multiple
        rotations = self._rotations.at(positions)
        hidden = self._embedding.index_select(0, pad(tokens, (0, filling)) if filling else tokens)
        for layer in self._layers:
            heads = layer.heads(self._normed(hidden))
            attended = self._attended(layer, heads[:count] if filling else heads, rotations.of(layer.number), layout)
            hidden = layer.proj.added(pad(attended, (0, 0, 0, filling)) if filling else attended, hidden)
            normed = self._normed(hidden)
            hidden = layer.out.added(layer.value.multiplied(normed, layer.gate.silu(normed)), hidden)
        if select is not None:
            count = select.shape[0]
            hidden = pad(hidden.index_select(0, select), (0, 0, 0, -count % self._multiple))
        return self._output(self._normed(hidden).to(self._output_dtype))[:count]

    def _attended(self, layer: FrozenLayer, heads: Tensor, rotation: Rotation, layout: Layout) -> Tensor:
        """[tokens, (heads + 2 * kv_heads) * head_size] -> [tokens, heads * head_size]"""
        heads = heads.view(heads.shape[0], -1, self._head_size)
        turned = heads.narrow(1, 0, self._heads + self._kv_heads)
        if layer.head_norms:
            of_query, of_key = layer.head_norms
            query, key = self._query_and_key(turned)
            turned = torch.cat((_head_normed(query, of_query), _head_normed(key, of_key)), dim=1)
        query, key = self._query_and_key(rotation.turned(turned))
        return layout.attend(layer.number, query, key, heads.narrow(1, self._heads + self._kv_heads, self._kv_heads))

    def _query_and_key(self, both: Tensor) -> tuple[Tensor, Tensor]:
        return both.narrow(1, 0, self._heads), both.narrow(1, self._heads, self._kv_heads)

    def _normed(self, hidden: Tensor) -> Tensor:
        """RMSNorm without its weight and its sqrt(hidden), which `_with_norm` moves into the following product.

        Uses only operators with exactly rounded results. With others, such as hypot, the length of a row would depend
        on whether it shares a vector with other rows. In fp32 for any dtype of the model, as in training.
        """
        length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=torch.float32)
        return (hidden * length.square_().add_(self._least).rsqrt_()).to(hidden.dtype)


def _with_norm(norm: Norm, weight: Tensor) -> Tensor:
    return weight * (norm.weight * norm.weight.shape[0] ** 0.5)


def _head_normed(heads: Tensor, norm: Norm) -> Tensor:
    return rms_norm(heads, norm.normalized_shape, norm.weight, norm.eps)
