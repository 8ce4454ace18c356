"""Specifications from which megatron-core builds the layers of a policy, by the model's features."""

from __future__ import annotations

from functools import cache
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    get_transformer_layer_offset,
)

from megatron_rl.model.delta_net import delta_spec
from megatron_rl.model.experts import build_experts, submodules_of
from megatron_rl.model.latent_attention import latent_spec
from megatron_rl.model.layers import NormsBehind, PackedLayer, RecomputedLayer, SelectiveLayer
from megatron_rl.model.lora import Adapters
from megatron_rl.model.norm import Norm
from megatron_rl.model.packed_attention import NoCoreAttention, PackedAttention, with_bias
from megatron_rl.model.platform.attention import AttentionForm
from megatron_rl.model.platform.device import Kernels, Linears
from megatron_rl.model.platform.megatron_patches import patch_router
from megatron_rl.recipe.layer_sizes import LayerKind
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
    def spec(kind: LayerKind) -> Any:
        return packed_layer_spec(config, model, kind, recompute, kernels, adapters)

    specs = [spec(LayerKind(model.layer_type(number), model.has_experts(number))) for number in numbers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=Norm)


def packed_layer_spec(
    config: TransformerConfig,
    model: ModelConfig,
    kind: LayerKind,
    recompute: Recompute,
    kernels: Kernels,
    adapters: Adapters | None,
) -> Any:
    made = layer_spec(config, model, kind.attention, kind.has_experts, kernels, adapters)
    linears = kernels.linears(config) or Linears(ColumnParallelLinear, RowParallelLinear)
    if model.latent_attention:
        made.submodules.self_attention = latent_spec(model, linears, adapters)
    if kind.attention == "linear_attention" and model.delta_net:
        made.submodules.self_attention = delta_spec(model.delta_net, kernels.delta_kernels, linears, adapters)
    if model.norms != "before":
        made.submodules = NormsBehind(**vars(made.submodules))
    if model.norms == "behind":
        made.submodules.input_layernorm = made.submodules.pre_mlp_layernorm = IdentityOp
    if kind.has_experts:
        build_experts(submodules_of(made.submodules.mlp), config, model, kernels)
    made.module = {"none": PackedLayer, "selective": SelectiveLayer, "full": RecomputedLayer}[recompute]
    return made


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
    self_attention.params["joint_norms"] = model.qk_norm_of == "layer"
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
