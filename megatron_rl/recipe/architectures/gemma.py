"""Row of Gemma 3: windows with other rotary positions in five of six layers, and norms around each part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.recipe.architectures.parts import heads, layer_types, scaling, undivided, written_scaling
from megatron_rl.recipe.architectures.row import Architecture, ConfigKeys, HfNames, UnusableConfig, always, only
from megatron_rl.recipe.model import ModelConfig


def _rotations() -> ConfigKeys:
    """Rotary positions of both kinds of layers, in `rope_parameters` by kind since transformers 5."""
    keys = {"rope_parameters": None, "rope_scaling": None, "rope_theta": 1e6, "rope_local_base_freq": 1e4}

    def read(raw: Mapping[str, Any]) -> dict[str, Any]:
        kinds = raw["rope_parameters"] or {}
        full, sliding = kinds.get("full_attention") or {}, kinds.get("sliding_attention") or {}
        if scaling(sliding, "rope_parameters of sliding_attention"):
            raise UnusableConfig("rope_parameters: scaled positions of layers with windows are not supported")
        return {
            "rope_base": float(full.get("rope_theta", raw["rope_theta"])),
            "rope_scaling": scaling(full or raw["rope_scaling"] or {}, "rope_parameters"),
            "sliding_rope_base": float(sliding.get("rope_theta", raw["rope_local_base_freq"])),
        }

    def write(model: ModelConfig) -> dict[str, Any]:
        return {
            "rope_theta": model.rope_base,
            "rope_local_base_freq": model.sliding_rope_base,
            "rope_scaling": None if model.rope_scaling is None else written_scaling(model.rope_scaling),
        }

    names = {"rope_base": "rope_theta", "rope_scaling": "rope_scaling", "sliding_rope_base": "rope_local_base_freq"}
    return ConfigKeys(keys, read, write, names)


def _scores() -> ConfigKeys:
    def write(model: ModelConfig) -> dict[str, Any]:
        return {"query_pre_attn_scalar": None if model.attention_scale is None else round(model.attention_scale**-2)}

    return ConfigKeys(
        {"query_pre_attn_scalar": 256},
        lambda raw: {"attention_scale": raw["query_pre_attn_scalar"] ** -0.5},
        write,
        {"attention_scale": "query_pre_attn_scalar"},
    )


GEMMA3 = Architecture(
    "Gemma3ForCausalLM",
    "gemma3_text",
    (
        *undivided(act=("hidden_activation", "gelu_pytorch_tanh"), tied=True),
        heads(256),
        _rotations(),
        layer_types(every=6, window=4096),
        only("sliding_window_pattern", 6, None),
        _scores(),
        only("attention_bias", False),
        only("attn_logit_softcapping", None),
        only("final_logit_softcapping", None),
        only("use_bidirectional_attention", False, None),
        always(
            qk_norm=True,
            qkv_bias=False,
            zero_centered_norms=True,
            norms="around",
            scaled_embedding=True,
            activation="gelu_tanh",
        ),
    ),
    inert=frozenset({"cache_implementation"}),
    names=HfNames(
        norms=(
            ("input_layernorm", "input_layernorm"),
            ("post_self_attn_layernorm", "post_attention_layernorm"),
            ("pre_mlp_layernorm", "pre_feedforward_layernorm"),
            ("post_mlp_layernorm", "post_feedforward_layernorm"),
        )
    ),
)
