"""Rows of Qwen3-Next and Qwen3.5, whose gated delta nets stand beside gated attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_rl.recipe.architectures.parts import heads, rotation, undivided
from megatron_rl.recipe.architectures.row import (
    REQUIRED,
    Architecture,
    ConfigKeys,
    HfNames,
    PredictionNames,
    UnusableConfig,
    always,
    layers_of,
    only,
    same,
)
from megatron_rl.recipe.model import ModelConfig

_SIZES = {
    "key_heads": ("linear_num_key_heads", 16),
    "value_heads": ("linear_num_value_heads", 32),
    "key_head_dim": ("linear_key_head_dim", 128),
    "value_head_dim": ("linear_value_head_dim", 128),
    "conv_kernel": ("linear_conv_kernel_dim", 4),
}
"""Keys of DeltaNet, each with its key of config.json and what transformers takes for a missing one."""


def _layers() -> ConfigKeys:
    """Full attention in every fourth layer and delta nets in the others, unless config.json says otherwise."""

    def read(raw: Mapping[str, Any]) -> dict[str, Any]:
        types = raw["layer_types"]
        if types is None:
            every = raw["full_attention_interval"]
            types = ["linear_attention" if number % every else "full_attention" for number in layers_of(raw)]
        if "linear_attention" not in types:
            return {}
        return {"layer_types": types, "delta_net": {ours: raw[theirs] for ours, (theirs, _) in _SIZES.items()}}

    def write(model: ModelConfig) -> dict[str, Any]:
        sizes = {} if model.delta_net is None else model.delta_net.model_dump()
        types = model.layer_types or ["full_attention"] * model.num_layers
        return {"layer_types": types, **{theirs: sizes.get(ours) for ours, (theirs, _) in _SIZES.items()}}

    keys = {"num_hidden_layers": REQUIRED, "layer_types": None, "full_attention_interval": 4}
    names = {"layer_types": "layer_types", "delta_net": "linear_num_key_heads, linear_num_value_heads and their sizes"}
    return ConfigKeys(keys | dict(_SIZES.values()), read, write, names)


def _gated_experts(per_token: int) -> ConfigKeys:
    """Experts in every layer, and one with a gate that processes every token.

    per_token: what transformers takes for a missing num_experts_per_tok.
    """
    theirs = {
        "num_experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
        "expert_ffn_hidden_size": "moe_intermediate_size",
        "shared_expert_ffn_hidden_size": "shared_expert_intermediate_size",
    }

    def read(raw: Mapping[str, Any]) -> dict[str, Any]:
        if raw["num_experts_per_tok"] == 1:
            raise UnusableConfig(
                "num_experts_per_tok 1 is not supported: its weight is its probability here, and there 1"
            )
        sizes = {key: raw[name] for key, name in theirs.items()}
        return {**sizes, "shared_expert_gate": True, "router": {"normalised": raw["norm_topk_prob"]}}

    def write(model: ModelConfig) -> dict[str, Any]:
        sizes = {name: getattr(model, key) for key, name in theirs.items()}
        return {**sizes, "norm_topk_prob": None if model.router.normalised else False}

    keys = {
        "num_experts": REQUIRED,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    }
    return ConfigKeys(keys, read, write, theirs | {"router": "norm_topk_prob"})


def _hybrid(ffn: str) -> tuple[ConfigKeys, ...]:
    """Keys that Qwen3-Next and Qwen3.5 share. ffn: key of the width of feed-forward networks."""
    return (
        *undivided(ffn=ffn),
        heads(256),
        rotation(partial=0.25, ignored=("mrope_section", "mrope_interleaved")),  # those of images
        _layers(),
        only("attention_bias", False),
        only("attn_output_gate", True),
        always(qk_norm=True, qkv_bias=False, attention_gate=True, zero_centered_norms=True),
    )


# mamba_ssm_dtype is that of the states in vLLM.
_INERT = frozenset({"mamba_ssm_dtype", "use_sliding_window"})
_PREDICTION = PredictionNames(
    layer="mtp.layers.0",
    token_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    projection="mtp.fc",
    norm="mtp.norm",
    embedding=None,
    output=None,
)
_PREDICTS = same("prediction_layers", "mtp_num_hidden_layers", 0), only("mtp_use_dedicated_embeddings", False)
_EVERYWHERE = ": layers without experts beside those with are not supported"

QWEN3_NEXT = Architecture(
    "Qwen3NextForCausalLM",
    "qwen3_next",
    (
        *_hybrid("intermediate_size"),
        _gated_experts(10),
        only("decoder_sparse_step", 1, why=_EVERYWHERE),
        only("mlp_only_layers", [], None, why=_EVERYWHERE),
        same("prediction_layers", "num_nextn_predict_layers", 1),  # the published config.json does not mention it
    ),
    inert=_INERT,
    names=HfNames(delta_by_key_heads=True, shared_expert="shared_expert", prediction=_PREDICTION),
    kept=("mtp.",),
)
QWEN3_5 = Architecture(
    "Qwen3_5ForCausalLM",
    "qwen3_5_text",
    (*_hybrid("intermediate_size"), *_PREDICTS),
    inert=_INERT,
    names=HfNames(prediction=_PREDICTION),
    kept=("mtp.",),
)
QWEN3_5_MOE = Architecture(
    "Qwen3_5MoeForCausalLM",
    "qwen3_5_moe_text",
    (*_hybrid("moe_intermediate_size"), _gated_experts(8), *_PREDICTS),
    inert=_INERT | {"intermediate_size"},
    names=HfNames(shared_expert="shared_expert", prediction=_PREDICTION),
    kept=("mtp.",),
)


def _seeing(text: Architecture, name: str, model_type: str) -> Architecture:
    """Row of a model that also sees, and has this one inside. Its vision tower is kept as published."""
    return Architecture(
        name,
        model_type,
        text.parts,
        inert=text.inert,
        names=replace(text.names, body="model.language_model"),
        kept=("mtp.", "model.visual."),
        inside="text_config",
        inert_outside=frozenset(
            {
                "vision_config",
                "image_token_id",
                "video_token_id",
                "vision_start_token_id",
                "vision_end_token_id",
                "language_model_only",
            }
        ),
    )


SEEING_QWEN3_5 = _seeing(QWEN3_5, "Qwen3_5ForConditionalGeneration", "qwen3_5")
SEEING_QWEN3_5_MOE = _seeing(QWEN3_5_MOE, "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe")
