"""megatron-core's transformer layer for packed tokens.

Modules, names and sharded state are megatron-core's; only `forward` differs. Its own passes every token through caches,
cross-attention, offloading and communication that are unused here and took a sixth of the demo's step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    all_gather_last_dim_from_tensor_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import pad, rms_norm
from torch.utils.checkpoint import checkpoint

from megatron_rl.model.activation import gated_activation
from megatron_rl.model.delta_net import GatedDelta, delta_spec
from megatron_rl.model.experts import GroupedExperts, build_experts, sort_on_device, submodules_of
from megatron_rl.model.latent_attention import latent_spec
from megatron_rl.model.lora import Adapters
from megatron_rl.model.platform.attention import AttentionForm, Layout
from megatron_rl.model.platform.device import Kernels, Linears
from megatron_rl.model.platform.megatron_patches import patch_router
from megatron_rl.model.rotation import Rotation, Rotations
from megatron_rl.model.router import Replay
from megatron_rl.recipe.model import ModelConfig, Recompute
from megatron_rl.recipe.model_parts import LayerType


def packed_block_spec(
    config: TransformerConfig,
    model: ModelConfig,
    recompute: Recompute,
    kernels: Kernels,
    stage: int,
    adapters: Adapters | None,
) -> Any:
    """Specification of the layers of a pipeline stage, each by its type of attention and its feed-forward network."""
    if model.num_experts is not None:
        patch_router()
    first = get_transformer_layer_offset(config, pp_rank=stage)
    numbers = range(first, first + get_num_layers_to_build(config, pp_rank=stage))

    @cache
    def spec(attention: LayerType, has_experts: bool) -> Any:
        made = layer_spec(config, model, attention, has_experts, kernels, adapters)
        linears = kernels.linears(config) or Linears(ColumnParallelLinear, RowParallelLinear)
        if model.latent_attention:
            made.submodules.self_attention = latent_spec(model, linears, adapters, Norm)
        if attention == "linear_attention" and model.delta_net:
            made.submodules.self_attention = delta_spec(model.delta_net, kernels.delta_kernels, linears)
        if model.norms_around:
            made.submodules = NormsAround(**vars(made.submodules))
        if has_experts:
            build_experts(submodules_of(made.submodules.mlp), config, model, kernels)
        made.module = {"none": PackedLayer, "selective": SelectiveLayer, "full": RecomputedLayer}[recompute]
        return made

    specs = [spec(model.layer_type(number), model.has_experts(number)) for number in numbers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=Norm)


def layer_spec(
    config: TransformerConfig,
    model: ModelConfig,
    attention: LayerType,
    has_experts: bool,
    kernels: Kernels,
    adapters: Adapters | None,
) -> Any:
    spec: Any = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if has_experts else None,
        normalization="RMSNorm",
        qk_layernorm=config.qk_layernorm,
    )
    self_attention = spec.submodules.self_attention
    self_attention.module = PackedAttention
    self_attention.params["sinks"] = model.attention_sinks
    self_attention.params["form"] = AttentionForm(
        model.sliding_window if attention == "sliding_attention" else None, model.attention_scale
    )
    self_attention.submodules.core_attention = NoCoreAttention
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    if config.qk_layernorm:
        self_attention.submodules.q_layernorm = self_attention.submodules.k_layernorm = Norm
    linears = kernels.linears(config)
    if linears and linears.norm:
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = linears.norm
    _set_linears(spec, linears, adapters)
    if model.output_bias:
        self_attention.submodules.linear_proj = with_bias(self_attention.submodules.linear_proj)
    return spec


def plain_block_spec(config: TransformerConfig, adapters: Adapters | None) -> Any:
    """Specification of the same modules and weights in megatron-core's own layers, for its dynamic engine."""
    spec: Any = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = NoCoreAttention
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    _set_linears(spec, None, adapters)
    return TransformerBlockSubmodules(layer_specs=[spec] * config.num_layers, layer_norm=Norm)


def _set_linears(spec: Any, linears: Linears | None, adapters: Adapters | None) -> None:
    if linears is None and adapters is None:
        return
    linears = linears or Linears(ColumnParallelLinear, RowParallelLinear)
    attention, mlp = spec.submodules.self_attention.submodules, submodules_of(spec.submodules.mlp)
    networks = {"mlp": mlp}
    if getattr(mlp, "experts", None) is not None:
        networks = {f"mlp.{name}": submodules_of(getattr(mlp, name)) for name in ("experts", "shared_experts")}
    for part, name, linear, kind in (
        (attention, "self_attention", "linear_qkv", linears.column),
        (attention, "self_attention", "linear_proj", linears.row),
        *((part, name, "linear_fc1", linears.column) for name, part in networks.items()),
        *((part, name, "linear_fc2", linears.row) for name, part in networks.items()),
    ):
        setattr(part, linear, adapters.adapted(f"{name}.{linear}", kind) if adapters else kind)


def with_bias(linear: type) -> type:
    """Return the class of a linear that has a bias even where the configuration gives linears none."""

    def build(self: Any, *args: Any, **given: Any) -> None:
        linear.__init__(self, *args, **given | {"bias": True})  # type: ignore[misc]

    return type(f"Biased{linear.__name__}", (linear,), {"__init__": build})


@dataclass
class NormsAround(TransformerLayerSubmodules):
    """Submodules of a layer that also has norms behind its attention and its feed-forward network."""


class Norm(torch.nn.RMSNorm):
    """RMSNorm (arXiv 1910.07467) that supports a part of the tokens, which megatron-core's own torch norm refuses."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps)
        self.zero_centered = config.layernorm_zero_centered_gamma
        if self.zero_centered:
            torch.nn.init.zeros_(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # finalize_model_grads

    def forward(self, x: Tensor) -> Tensor:
        if not self.zero_centered:
            return super().forward(x)
        # In fp32, as transformers does for these models: 1 + weight loses the weight's last bits in bf16.
        return rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).to(x.dtype)


class PackedLayer(TransformerLayer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if isinstance(self.submodules_config, NormsAround):
            self.post_self_attn_layernorm, self.post_mlp_layernorm = (
                Norm(self.config, self.config.hidden_size, self.config.layernorm_epsilon) for _ in range(2)
            )
        attention = self.self_attention
        input_linear = (
            attention.in_proj if isinstance(attention, GatedDelta) else getattr(attention, "linear_qkv", None)
        )
        for norm, linear in (
            (self.input_layernorm, input_linear),
            (self.pre_mlp_layernorm, getattr(self.mlp, "linear_fc1", None)),
        ):
            if not isinstance(norm, Norm):  # a placeholder: the linear computes the norm
                norm.take_weight(linear)
        if isinstance(getattr(self.mlp, "experts", None), GroupedExperts):
            sort_on_device(self.mlp)
        self.activated = gated_activation(self.config)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        rotary_pos_emb: Rotations,
        packed_seq_params: Layout,
        attention_bias: Replay | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """[tokens, 1, hidden] -> the same, and no context for cross-attention.

        megatron-core's TransformerBlock calls its layers with these parameter names, and passes all of them on as they
        are. The replay is an argument, so that a pass that recomputes the layer replays its own micro-batch.
        """
        rotation = rotary_pos_emb.of(self.layer_number)
        attention = partial(self.self_attention, rotation=rotation, layout=packed_seq_params)
        if isinstance(self.mlp, MoELayer):
            self.mlp.router.begin(len(rotation.cosines), len(hidden_states), attention_bias)
        attended = self.through(self.input_layernorm, hidden_states, attention)
        if around := isinstance(self.submodules_config, NormsAround):
            attended = self.post_self_attn_layernorm(attended)
        hidden_states = hidden_states + attended
        out = self.through(self.pre_mlp_layernorm, hidden_states, self.feed_forward)
        return hidden_states + (self.post_mlp_layernorm(out) if around else out), None

    def feed_forward(self, normed: Tensor) -> Tensor:
        if isinstance(self.mlp, MoELayer):
            return self._experts(normed)
        gate_and_value, _bias = self.mlp.linear_fc1(normed)
        return self.through(self.activated, gate_and_value, lambda activated: self.mlp.linear_fc2(activated)[0])

    def _experts(self, normed: Tensor) -> Tensor:
        """Run the experts on [tokens, 1, hidden].

        megatron-core's dispatcher (0.16.1 and 0.19.2) keeps the probabilities of its last pass, and with them what
        autograd stored for it. A pass that recomputes a layer has no backward, and ends as soon as its tensors are
        restored: without the reset, one such pass would stay in memory per layer.
        """
        try:
            out: Tensor = self.mlp(normed)[0]
        finally:
            vars(self.mlp.token_dispatcher).update(probs=None, sent=None, received=None, of_sources=None)
        return out

    def through(
        self, function: Callable[[Tensor], Tensor], tensor: Tensor, consumer: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Apply `consumer` to the result of `function`, which is cheap to compute but large to store."""
        return consumer(function(tensor))


class PackedAttention(SelfAttention):
    def __init__(self, *args: Any, form: AttentionForm, sinks: bool, **kwargs: Any) -> None:
        """
        form: of the layer, without sinks.
        sinks: whether the layer has them, as a weight.
        """
        super().__init__(*args, **kwargs)
        self.form = form
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


class SelectiveLayer(PackedLayer):
    """Keeps only the inputs of norms and activations for the backward pass, which repeats them for their own gradient
    and for that of the next product. They take most of the memory and the least time; attention keeps little but its
    input."""

    def through(
        self, function: Callable[[Tensor], Tensor], tensor: Tensor, consumer: Callable[[Tensor], Tensor]
    ) -> Tensor:
        if not torch.is_grad_enabled():
            return consumer(function(tensor))
        output = _recomputed(function, tensor)
        kept, elements = output.untyped_storage()._cdata, output.numel()

        # The output is large and the consumer saves it for its backward pass. Each saved tensor that is all of it is
        # replaced by its shape, and computed again from the input when the backward pass asks. It is recognised by its
        # storage: a linear saves a view, [tokens, hidden] of [tokens, 1, hidden]. A part of it, or a transpose, is
        # kept, because the shape alone would not say which elements are meant.
        def pack(saved: Tensor) -> Tensor | torch.Size:
            whole = saved.untyped_storage()._cdata == kept and saved.numel() == elements and saved.is_contiguous()
            return saved.shape if whole else saved

        def unpack(packed: Tensor | torch.Size) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            with torch.no_grad():
                return function(tensor).view(packed)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return consumer(output)


class RecomputedLayer(PackedLayer):
    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return _recomputed(super().forward, *args, **kwargs)


def _recomputed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a function under torch's checkpoint. megatron-core's also handles the random state of dropout, which is 0."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


class NoCoreAttention(torch.nn.Module):
    """Fills megatron-core's slot for attention, which the layout computes."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
