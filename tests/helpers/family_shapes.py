"""Keys of tiny models with every option of a published family, for `tiny_model`."""

from __future__ import annotations

from typing import Any

GLM: dict[str, Any] = {
    "architecture": "glm4_moe",
    "head_dim": 12,
    "partial_rotary_factor": 0.5,
    "tied_embeddings": False,
    "num_experts": 6,
    "experts_per_token": 2,
    "expert_ffn_hidden_size": 20,
    "dense_layers": 1,
    "shared_expert_ffn_hidden_size": 20,
    "router": {"score": "sigmoid", "correction_bias": True},
}
LARGER_GLM = GLM | {
    "qk_norm": True,
    "num_layers": 3,
    "shared_expert_ffn_hidden_size": 40,
    "router": {"score": "sigmoid", "correction_bias": True, "scale": 2.5},
}
LATENT: dict[str, Any] = {
    "latent_attention": {
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 5,
    },
    "num_query_groups": 4,
    "qkv_bias": False,
    "tied_embeddings": False,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 12,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    },
}
DEEPSEEK: dict[str, Any] = LATENT | {
    "architecture": "deepseek_v3",
    "num_experts": 8,
    "experts_per_token": 2,
    "expert_ffn_hidden_size": 20,
    "dense_layers": 1,
    "shared_expert_ffn_hidden_size": 20,
    "router": {"score": "sigmoid", "scale": 2.5, "groups": 4, "groups_per_token": 2, "correction_bias": True},
}
DENSE_QUERIES = DEEPSEEK | {"latent_attention": DEEPSEEK["latent_attention"] | {"q_lora_rank": None}}

QWEN35: dict[str, Any] = {
    "architecture": "qwen3_5_text",
    "num_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "delta_net": {"key_heads": 2, "value_heads": 4, "key_head_dim": 8, "value_head_dim": 6},
    "qkv_bias": False,
    "qk_norm": True,
    "attention_gate": True,
    "zero_centered_norms": True,
    "partial_rotary_factor": 0.5,
    "head_dim": 12,
    "tied_embeddings": False,
}
GATED_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "experts_per_token": 2,
    "expert_ffn_hidden_size": 20,
    "ffn_hidden_size": 20,
    "shared_expert_ffn_hidden_size": 24,
    "shared_expert_gate": True,
}
QWEN35_MOE = QWEN35 | GATED_EXPERTS | {"architecture": "qwen3_5_moe_text"}
QWEN3_NEXT = QWEN35 | GATED_EXPERTS | {"architecture": "qwen3_next"}
GEMMA: dict[str, Any] = {
    "architecture": "gemma3_text",
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
    "sliding_rope_base": 1e3,
    "rope_scaling": {"type": "linear", "factor": 8.0},
    "attention_scale": 0.25,
    "qkv_bias": False,
    "qk_norm": True,
    "zero_centered_norms": True,
    "norms": "around",
    "activation": "gelu_tanh",
    "scaled_embedding": True,
    "head_dim": 12,
}
OLMO: dict[str, Any] = {
    "architecture": "olmo3",
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
    "sliding_rope_base": 1e4,
    "rope_base": 1e4,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12, "attention_factor": 1.2},
    "qkv_bias": False,
    "qk_norm": True,
    "qk_norm_of": "layer",
    "norms": "behind",
    "tied_embeddings": False,
}
GPT_OSS: dict[str, Any] = {
    "head_dim": 12,
    "output_bias": True,
    "attention_sinks": True,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 3,
    "tied_embeddings": False,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12, "truncate": False},
    "ffn_hidden_size": 24,
    "num_experts": 4,
    "experts_per_token": 2,
    "expert_ffn_hidden_size": 24,
    "expert_bias": True,
    "swiglu_limit": 0.5,
    "router": {"linear_bias": True},
}
