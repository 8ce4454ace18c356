"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) on packed tokens.

The modules have the names of megatron-core's MLASelfAttention. Keys and values are computed for all heads, and attend
like those of any other model: what is saved is the memory of weights, not that of a cache.

    hidden --linear_q_down_proj--> q_layernorm --linear_q_up_proj--> queries: of each head (qk_nope, qk_rope)
    hidden --linear_kv_down_proj--> (latent, rotated part of the key that all heads share)
           latent --> kv_layernorm --linear_kv_up_proj--> of each head (qk_nope of the key, value)

Tensor-parallel ranks split the heads; each has the down projections whole. Under sequence parallelism, each of them
projects its part of the tokens down, and only the short vectors travel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import linear, pad

from megatron_rl.model.lora import Adapters
from megatron_rl.model.norm import Norm
from megatron_rl.model.platform.attention import AttentionForm, Layout
from megatron_rl.model.platform.device import Linears
from megatron_rl.model.rotation import Rotation
from megatron_rl.recipe.model import ModelConfig
from megatron_rl.recipe.model_parts import LatentAttention

EPSILON = 1e-6
"""Epsilon of the norms of the short vectors, which transformers fixes whatever rms_norm_eps is."""


def latent_spec(model: ModelConfig, linears: Linears, adapters: Adapters | None) -> ModuleSpec:
    """Specification of the attention of a layer."""
    kinds = {
        "linear_q_proj": linears.column,
        "linear_q_down_proj": WholeLinear,
        "linear_q_up_proj": linears.column,
        "linear_kv_down_proj": WholeLinear,
        "linear_kv_up_proj": linears.column,
        "linear_proj": linears.row,
    }
    if adapters:
        kinds = {name: adapters.adapted(f"self_attention.{name}", kind) for name, kind in kinds.items()}
    return ModuleSpec(PackedLatentAttention, {"model": model, "linears": kinds})


class WholeLinear(MegatronModule):
    """Linear that each tensor-parallel rank has whole, of whatever tokens it is given."""

    explicit_expert_comm = False

    def __init__(self, inputs: int, outputs: int, *, config: TransformerConfig, tp_group: Any) -> None:
        super().__init__(config)
        self.tp_group, self.sequence_parallel = tp_group, config.sequence_parallel
        self.weight = Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        if config.perform_initialization:
            assert config.init_method is not None  # TransformerConfig's own default
            config.init_method(self.weight)
        # Marks for megatron-core's optimizer and `finalize_model_grads`.
        self.weight.allreduce = True  # type: ignore[attr-defined]
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """[..., inputs] -> [..., outputs] and no bias, as megatron-core's linears."""
        return linear(input_, self.weight), None


class PackedLatentAttention(MegatronModule):
    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        model: ModelConfig,
        linears: Mapping[str, Any],
        pg_collection: Any,
        **_: Any,
    ) -> None:
        super().__init__(config)
        assert model.latent_attention is not None
        self.layer_number, self.tp_group = layer_number, pg_collection.tp
        self._sizes: LatentAttention = model.latent_attention
        sizes, heads, hidden = self._sizes, model.num_attention_heads, model.hidden_size
        self._heads = heads // self.tp_group.size()
        factor = model.rope_scaling.score_factor if model.rope_scaling else 1.0
        self._form = AttentionForm(scale=factor * (model.attention_scale or model.head_size**-0.5))

        def of(name: str, inputs: int, outputs: int) -> Any:
            given = {"config": config, "tp_group": self.tp_group}
            if issubclass(linears[name], WholeLinear):
                return linears[name](inputs, outputs, **given)
            given |= {"bias": False, "skip_bias_add": True, "is_expert": False}
            if name == "linear_proj":
                given |= {"init_method": config.output_layer_init_method, "input_is_parallel": True}
            else:
                given |= {"init_method": config.init_method, "gather_output": False}
            return linears[name](inputs, outputs, **given)

        if sizes.q_lora_rank is None:
            self.linear_q_proj = of("linear_q_proj", hidden, heads * model.head_size)
        else:
            self.linear_q_down_proj = of("linear_q_down_proj", hidden, sizes.q_lora_rank)
            self.q_layernorm = Norm(config, sizes.q_lora_rank, EPSILON)
            self.linear_q_up_proj = of("linear_q_up_proj", sizes.q_lora_rank, heads * model.head_size)
        self.linear_kv_down_proj = of("linear_kv_down_proj", hidden, sizes.kv_lora_rank + sizes.qk_rope_head_dim)
        self.kv_layernorm = Norm(config, sizes.kv_lora_rank, EPSILON)
        of_head = sizes.qk_nope_head_dim + sizes.v_head_dim
        self.linear_kv_up_proj = of("linear_kv_up_proj", sizes.kv_lora_rank, heads * of_head)
        self.linear_proj = of("linear_proj", heads * sizes.v_head_dim, hidden)

    def forward(self, hidden: Tensor, rotation: Rotation, layout: Layout) -> Tensor:
        """Attend, [tokens, 1, hidden] -> the same: under sequence parallelism a part of the tokens, including the
        padding that makes the parts equal."""
        sizes, query = self._sizes, self._queries(hidden)
        down, _bias = self.linear_kv_down_proj(hidden)
        latent, shared = down.split((sizes.kv_lora_rank, sizes.qk_rope_head_dim), dim=-1)
        up, _bias = self.linear_kv_up_proj(self.kv_layernorm(latent))
        key_and_value, shared = up.squeeze(1).unflatten(-1, (self._heads, -1)), self._for_its_heads(shared)
        padding = len(query) - len(rotation.cosines)
        if padding:
            query, key_and_value, shared = (x[:-padding] for x in (query, key_and_value, shared))
        key, value = key_and_value.split((sizes.qk_nope_head_dim, sizes.v_head_dim), dim=-1)
        plain, turned = query.split((sizes.qk_nope_head_dim, sizes.qk_rope_head_dim), dim=-1)
        turned, shared = rotation.turn(halves(turned), halves(shared))
        query = torch.cat((plain, turned), dim=-1)
        key = torch.cat((key, shared.expand(-1, self._heads, -1)), dim=-1)
        attended = layout.attend(self.layer_number, query, key, value, self._form)
        if padding:
            attended = pad(attended, (0, 0, 0, padding))
        out: Tensor = self.linear_proj(attended[:, None])[0]
        return out

    def _queries(self, hidden: Tensor) -> Tensor:
        """[tokens, 1, hidden] -> [tokens, heads of this rank, head_size]"""
        if self._sizes.q_lora_rank is None:
            query, _bias = self.linear_q_proj(hidden)
        else:
            down, _bias = self.linear_q_down_proj(hidden)
            query, _bias = self.linear_q_up_proj(self.q_layernorm(down))
        heads: Tensor = query.squeeze(1).unflatten(-1, (self._heads, -1))
        return heads

    def _for_its_heads(self, shared: Tensor) -> Tensor:
        """Return the shared part of the keys of all tokens, for the heads of this rank, whose gradients for it are
        summed over the ranks. [tokens or a part of them, 1, qk_rope_head_dim] -> [tokens, 1, qk_rope_head_dim]"""
        if self.config.sequence_parallel:
            shared = gather_from_sequence_parallel_region(shared, group=self.tp_group)
        elif self.tp_group.size() > 1:
            shared = copy_to_tensor_model_parallel_region(shared, group=self.tp_group)
        return shared


def halves(heads: Tensor) -> Tensor:
    """Reorder pairs of neighbours into those that `Rotation` turns, of both halves: [..., (0, 1), (2, 3), ...] -> [...,
    0, 2, ..., 1, 3, ...]. Scores stay, because queries and keys have the same order."""
    return heads.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
