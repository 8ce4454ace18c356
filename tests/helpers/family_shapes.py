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
