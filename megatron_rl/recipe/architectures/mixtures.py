"""Rows of DeepSeek-V3 and Kimi-K2, GLM-4.5 and gpt-oss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.recipe.architectures.parts import attention_bias, decoder, heads, layer_types, rotation, undivided
from megatron_rl.recipe.architectures.row import (
    NULL,
    REQUIRED,
    Architecture,
    ConfigKeys,
    HfNames,
    UnusableConfig,
    always,
    only,
    same,
)
from megatron_rl.recipe.model import ModelConfig


def _read_routed(raw: Mapping[str, Any]) -> dict[str, Any]:
    if raw["num_experts_per_tok"] == 1 and raw["norm_topk_prob"]:
        raise UnusableConfig("norm_topk_prob true is not supported with one expert per token")
    shared, width = raw["n_shared_experts"], raw["moe_intermediate_size"]
    router = {
        "score": "sigmoid",
        "normalised": raw["norm_topk_prob"],
        "scale": raw["routed_scaling_factor"],
        "groups": raw["n_group"] or 1,
        "groups_per_token": raw["topk_group"] or 1,
        "correction_bias": True,
    }
    return {
        "num_experts": raw["n_routed_experts"],
        "experts_per_token": raw["num_experts_per_tok"],
        "expert_ffn_hidden_size": width,
        "shared_expert_ffn_hidden_size": shared * width if isinstance(shared, int) and shared else None,
        "router": router,
    }


def _write_routed(model: ModelConfig) -> dict[str, Any]:
    width = model.expert_ffn_hidden_size or 1
    return {
        "n_routed_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "moe_intermediate_size": model.expert_ffn_hidden_size,
        "n_shared_experts": (model.shared_expert_ffn_hidden_size or 0) // width,
        "norm_topk_prob": model.router.normalised,
        "routed_scaling_factor": model.router.scale,
        "n_group": model.router.groups,
        "topk_group": model.router.groups_per_token,
    }


def _routed_by_bias(scale: float, groups: int, groups_per_token: int, dense_layers: int) -> tuple[ConfigKeys, ...]:
    """Experts that are chosen by sigmoid scores with a correction bias, shared ones, and first layers without experts.
    The arguments are transformers' for missing keys."""

    keys = {
        "n_routed_experts": REQUIRED,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": REQUIRED,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": scale,
        "n_group": groups,
        "topk_group": groups_per_token,
    }
    names = {
        "num_experts": "n_routed_experts",
        "experts_per_token": "num_experts_per_tok",
        "expert_ffn_hidden_size": "moe_intermediate_size",
        "shared_expert_ffn_hidden_size": "n_shared_experts",
        "router": "n_group, topk_group, routed_scaling_factor, norm_topk_prob",
    }
    return (
        ConfigKeys(keys, _read_routed, _write_routed, names),
        same("dense_layers", "first_k_dense_replace", dense_layers),
        same("prediction_layers", "num_nextn_predict_layers", 0),
        only("scoring_func", "sigmoid", written=True),
        only("topk_method", "noaux_tc", written=True),  # vLLM reads it
        only("moe_layer_freq", 1),
    )


def _latent() -> ConfigKeys:
    """Latent attention. Each head has its own keys and values."""
    parts = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

    def read(raw: Mapping[str, Any]) -> dict[str, Any]:
        count = raw["num_attention_heads"]
        if raw["num_key_value_heads"] not in (None, count):
            raise UnusableConfig(f"num_key_value_heads {raw['num_key_value_heads']} is not num_attention_heads {count}")
        return {
            "num_attention_heads": count,
            "num_query_groups": count,
            "latent_attention": {key: raw[key] for key in parts},
            "qkv_bias": False,
        }

    def write(model: ModelConfig) -> dict[str, Any]:
        sizes = {} if model.latent_attention is None else model.latent_attention.model_dump()
        if sizes and sizes["q_lora_rank"] is None:
            sizes["q_lora_rank"] = NULL
        count = model.num_attention_heads
        return {"num_attention_heads": count, "num_key_value_heads": count, **sizes}

    keys = dict.fromkeys(parts, REQUIRED) | {
        "q_lora_rank": 1536,
        "num_attention_heads": REQUIRED,
        "num_key_value_heads": None,
    }
    names = {key: key for key in ("num_attention_heads", "num_query_groups")}
    return ConfigKeys(keys, read, write, names | {"latent_attention": "kv_lora_rank, q_lora_rank and sizes of heads"})


DEEPSEEK_V3 = Architecture(
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    (
        *undivided(quantised=("fp8",)),
        _latent(),
        rotation(),
        *_routed_by_bias(2.5, 8, 4, 3),
        only("rope_interleave", True),
        only("attention_bias", False),
    ),
    # head_dim: transformers writes that of the rotated part. The others balance experts in pretraining, and place them.
    inert=frozenset(
        {"head_dim", "qk_head_dim", "aux_loss_alpha", "seq_aux", "ep_size", "num_experts", "num_local_experts"}
    ),
    also=("kimi_k2",),
)
GLM4_MOE = Architecture(
    "Glm4MoeForCausalLM",
    "glm4_moe",
    (
        *decoder(epsilon=1e-5),
        rotation(partial=0.5),
        attention_bias(qkv_bias=True),
        same("qk_norm", "use_qk_norm", False),
        *_routed_by_bias(1.0, 1, 1, 1),
    ),
    inert=frozenset({"aux_loss_alpha", "seq_aux", "ep_size", "num_experts", "num_local_experts"}),
)


def _clamped_experts() -> tuple[ConfigKeys, ...]:
    def read(raw: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "num_experts": raw["num_local_experts"],
            "experts_per_token": raw["num_experts_per_tok"],
            "expert_ffn_hidden_size": raw["intermediate_size"],
            "expert_bias": True,
            "router": {"linear_bias": True},
            "swiglu_limit": raw["swiglu_limit"],
        }

    def write(model: ModelConfig) -> dict[str, Any]:
        return {
            "num_local_experts": model.num_experts,
            "num_experts_per_tok": model.experts_per_token,
            "intermediate_size": model.expert_ffn_hidden_size,
            "swiglu_limit": model.swiglu_limit,
        }

    keys = {"num_local_experts": 128, "num_experts_per_tok": 4, "intermediate_size": REQUIRED, "swiglu_limit": 7.0}
    names = {
        "num_experts": "num_local_experts",
        "experts_per_token": "num_experts_per_tok",
        "expert_ffn_hidden_size": "intermediate_size",
        "swiglu_limit": "swiglu_limit",
    }
    return ConfigKeys(keys, read, write, names), only("swiglu_alpha", 1.702)


GPT_OSS = Architecture(
    "GptOssForCausalLM",
    "gpt_oss",
    (
        *undivided(quantised=("mxfp4",), epsilon=1e-5),
        heads(64),
        rotation(
            scaled={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
            base=150000.0,
        ),
        layer_types(every=2, window=128),
        only("attention_bias", True, written=True),
        always(qkv_bias=True, output_bias=True, attention_sinks=True),
        *_clamped_experts(),
    ),
    inert=frozenset({"experts_per_token", "initial_context_length", "num_experts"}),  # second names
    names=HfNames(router="router", stacked_experts=True),
)
