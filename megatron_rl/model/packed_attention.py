"""megatron-core's self-attention on packed tokens, which a layout computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    all_gather_last_dim_from_tensor_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import pad

from megatron_rl.model.norm import JointNorm
from megatron_rl.model.platform.attention import AttentionForm, Layout
from megatron_rl.model.rotation import Rotation


class PackedAttention(SelfAttention):
    def __init__(self, *args: Any, form: AttentionForm, sinks: bool, joint_norms: bool, **kwargs: Any) -> None:
        """
        form: of the layer, without sinks.
        sinks: whether the layer has them, as a weight.
        joint_norms: whether queries and keys are normalised over all heads together.
        """
        super().__init__(*args, **kwargs)
        self.form = form
        if joint_norms:
            ranks, size = self.pg_collection.tp, self.hidden_size_per_attention_head
            for name, heads in (("q", self.config.num_attention_heads), ("k", self.config.num_query_groups)):
                weight = self.linear_proj.weight.new_empty(heads // ranks.size() * size)
                norm = JointNorm(weight, heads, self.config.layernorm_epsilon, ranks)
                setattr(self, f"{name}_layernorm", norm)
        self.sinks: Parameter | None = None
        if sinks:
            heads = self.config.num_attention_heads // self.pg_collection.tp.size()
            self.sinks = Parameter(self.linear_proj.weight.new_zeros(heads))
            set_tensor_model_parallel_attributes(self.sinks, is_parallel=True, dim=0, stride=1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        found: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.sinks is not None:  # megatron-core takes it for a weight that each tensor-parallel rank has whole
            key = f"{prefix}sinks"
            found[key] = make_tp_sharded_tensor_for_checkpoint(
                self.sinks,
                key,
                prepend_offsets=sharded_offsets,
                tp_group=self.tp_group,
                dp_cp_group=(metadata or {})["dp_cp_group"],
            )
        return found

    def forward(self, hidden: Tensor, rotation: Rotation, layout: Layout) -> Tensor:
        """Attend, [tokens, 1, hidden] -> the same. Under sequence parallelism these are a part of the tokens: the
        linears gather and scatter them, including the padding that makes the parts equal. The padding follows the
        tokens of the layout and attends to nothing."""
        gate = None
        if self.config.attention_output_gate:
            query, key, value, gate = self._gated(hidden)
        else:
            query, key, value = (x.squeeze(1) for x in self.get_query_key_value_tensors(hidden))
        padding = len(query) - len(rotation.cosines)
        if padding:
            query, key, value = (x[:-padding] for x in (query, key, value))
        query, key = rotation.turn(query, key)
        form = self.form if self.sinks is None else replace(self.form, sinks=self.sinks)
        attended = layout.attend(self.layer_number, query, key, value, form)
        if gate is not None:
            attended = attended * gate[: len(attended)].sigmoid()
        if padding:
            attended = pad(attended, (0, 0, 0, padding))
        out, bias = self.linear_proj(attended[:, None])
        return out if bias is None else out + bias

    def _gated(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return query, key and value, each [tokens, heads, head_size], and the gate, [tokens, heads * head_size].

        A group's rows of `linear_qkv` are those of its query heads, each followed by its gate, then key and value: the
        order of published weights, while megatron-core's has the gates behind all query heads of the group, and in
        0.16.1 too many of them if ranks share a group.
        """
        mixed, _bias = self.linear_qkv(hidden)
        ranks, size = self.pg_collection.tp, self.hidden_size_per_attention_head
        sharing = self.world_size // self.config.num_query_groups
        if sharing > 1:  # each rank has some rows of a group
            mixed = all_gather_last_dim_from_tensor_parallel_region(mixed, group=ranks)
            mixed = mixed.chunk(self.config.num_query_groups, dim=-1)[ranks.rank() // sharing]
        groups = mixed.squeeze(1).unflatten(-1, (self.num_query_groups_per_partition, -1))
        both, key, value = groups.split((groups.shape[-1] - 2 * size, size, size), dim=-1)
        both = both.reshape(len(both), -1, 2 * size)
        if sharing > 1:
            both = both.chunk(sharing, dim=1)[ranks.rank() % sharing]
        query, gate = both.chunk(2, dim=-1)
        if self.q_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        return query, key, value, gate.flatten(1)


def with_bias(linear: type) -> type:
    """Return the class of a linear that has a bias even where the configuration gives linears none."""

    def build(self: Any, *args: Any, **given: Any) -> None:
        linear.__init__(self, *args, **given | {"bias": True})  # type: ignore[misc]

    return type(f"Biased{linear.__name__}", (linear,), {"__init__": build})


class NoCoreAttention(torch.nn.Module):
    """Fills megatron-core's slot for attention, which the layout computes."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
