"""Rows of Qwen2, Qwen3, Llama, Mistral, and Qwen3 with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.recipe.architectures.parts import attention_bias, decoder, rotation
from megatron_rl.recipe.architectures.row import Architecture, ConfigKeys, UnusableConfig, always, only
from megatron_rl.recipe.model import ModelConfig


def _positions(window: int | None, *, switch: bool) -> ConfigKeys:
    """Positions, of which a sliding window limits the number: within its length it makes no difference.

    window: what transformers takes for a missing sliding_window.
    switch: whether use_sliding_window must be true for a window.
    """
    keys = {"max_position_embeddings": None, "sliding_window": window, "layer_types": None, "max_window_layers": None}

    def read(raw: Mapping[str, Any]) -> dict[str, Any]:
        most, width = raw["max_position_embeddings"], raw["sliding_window"]
        if width is None or not raw.get("use_sliding_window", True) or not isinstance(most, int):
            return {}
        if not isinstance(width, int):
            raise UnusableConfig(f"sliding_window {width} is not a number")
        return {"max_position_embeddings": min(most, width)}

    return ConfigKeys(
        keys | ({"use_sliding_window": False} if switch else {}), read, lambda _: {"use_sliding_window": False}
    )


def _all_experts() -> tuple[ConfigKeys, ...]:
    """Experts in every layer."""

    def read(raw: Mapping[str, Any]) -> dict[str, Any]:
        several = raw["num_experts_per_tok"] != 1
        if raw["norm_topk_prob"] and not several:
            raise UnusableConfig(
                "norm_topk_prob true is not supported with one expert per token: its weight is its probability here"
            )
        return {
            "num_experts": raw["num_experts"] or raw["num_local_experts"],
            "experts_per_token": raw["num_experts_per_tok"],
            "expert_ffn_hidden_size": raw["moe_intermediate_size"],
            "router": {"normalised": bool(raw["norm_topk_prob"])} if several else {},
        }

    def write(model: ModelConfig) -> dict[str, Any]:
        several = model.experts_per_token != 1  # normalising a single weight would make it 1
        return {
            "num_experts": model.num_experts,
            "num_experts_per_tok": model.experts_per_token,
            "moe_intermediate_size": model.expert_ffn_hidden_size,
            "norm_topk_prob": several and model.router.normalised,
        }

    keys = {
        "num_experts": None,
        "num_local_experts": None,  # its name since transformers 5
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
    }
    names = {
        "num_experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
        "expert_ffn_hidden_size": "moe_intermediate_size",
        "router": "norm_topk_prob",
    }
    everywhere = ": layers without experts beside those with are not supported"
    return (
        ConfigKeys(keys, read, write, names),
        only("decoder_sparse_step", 1, written=True, why=everywhere),
        only("mlp_only_layers", [], None, written=True, why=everywhere),
    )


QWEN2 = Architecture(
    "Qwen2ForCausalLM",
    "qwen2",
    (*decoder(), rotation(), _positions(4096, switch=True), only("use_mrope", False), always(qkv_bias=True)),
    inert=frozenset({"attention_bias"}),  # its layers have biases whatever it says
)
QWEN3 = Architecture(
    "Qwen3ForCausalLM",
    "qwen3",
    (
        *decoder(head_dim=128),
        rotation(),
        _positions(4096, switch=True),
        attention_bias(qkv_bias=True, output_bias=True),
        always(qk_norm=True),
    ),
)
LLAMA = Architecture(
    "LlamaForCausalLM",
    "llama",
    (
        *decoder(),
        rotation(),
        attention_bias(qkv_bias=True, output_bias=True),
        only("mlp_bias", False),
        only("use_sliding_window", False, written=True),
    ),
)
MISTRAL = Architecture(
    "MistralForCausalLM",
    "mistral",
    (*decoder(), rotation(), _positions(4096, switch=False), always(qkv_bias=False)),
)
QWEN3_MOE = Architecture(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    (
        *decoder(),
        rotation(),
        _positions(4096, switch=True),
        attention_bias(qkv_bias=True, output_bias=True),
        only("qkv_bias", False),  # the next are Qwen3-Coder's
        only("use_qk_norm", True),
        only("shared_expert_intermediate_size", 0, None),
        always(qk_norm=True),
        *_all_experts(),
    ),
)
