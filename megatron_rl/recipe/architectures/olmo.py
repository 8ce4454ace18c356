"""Row of OLMo 3: windows without scaled positions, norms behind each part, and one norm over all heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.recipe.architectures.parts import (
    attention_bias,
    heads,
    layer_types,
    scaling,
    undivided,
    written_scaling,
)
from megatron_rl.recipe.architectures.row import Architecture, ConfigKeys, HfNames, UnusableConfig, always
from megatron_rl.recipe.model import ModelConfig


def _rotations() -> ConfigKeys:
    """Rotary positions, in `rope_parameters` by kind of layer since transformers 5; only full attention scales them."""
    keys = {"rope_parameters": None, "rope_scaling": None, "rope_theta": 5e5}

    def read(raw: Mapping[str, Any]) -> dict[str, Any]:
        kinds = raw["rope_parameters"] or {}
        if kinds and raw["rope_scaling"]:
            raise UnusableConfig("rope_parameters and rope_scaling are both given: leave one of them")
        full, sliding = kinds.get("full_attention") or {}, kinds.get("sliding_attention") or {}
        if scaling(sliding, "rope_parameters of sliding_attention"):
            raise UnusableConfig("rope_parameters: scaled positions of layers with windows are not supported")
        base = float(full.get("rope_theta", raw["rope_theta"]))
        of_windows = float(sliding.get("rope_theta", raw["rope_theta"]))
        scaled = scaling(full or raw["rope_scaling"] or {}, "rope_parameters" if full else "rope_scaling")
        differ = scaled is not None or of_windows != base
        return {"rope_base": base, "rope_scaling": scaled, "sliding_rope_base": of_windows if differ else None}

    def write(model: ModelConfig) -> dict[str, Any]:
        of_windows = model.rope_base if model.sliding_rope_base is None else model.sliding_rope_base
        scaled = {"rope_type": "default"} if model.rope_scaling is None else written_scaling(model.rope_scaling)
        kinds = {
            "full_attention": {**scaled, "rope_theta": model.rope_base},
            "sliding_attention": {"rope_type": "default", "rope_theta": of_windows},
        }
        return {"rope_parameters": kinds}

    names = {"rope_base": "rope_theta", "rope_scaling": "rope_scaling", "sliding_rope_base": "rope_theta"}
    return ConfigKeys(keys, read, write, names)


OLMO3 = Architecture(
    "Olmo3ForCausalLM",
    "olmo3",
    (
        *undivided(epsilon=1e-5),
        heads(None),
        _rotations(),
        layer_types(every=4, window=4096),
        attention_bias(qkv_bias=True, output_bias=True),
        always(qk_norm=True, qk_norm_of="layer", norms="behind"),
    ),
    names=HfNames(
        norms=(
            ("post_self_attn_layernorm", "post_attention_layernorm"),
            ("post_mlp_layernorm", "post_feedforward_layernorm"),
        )
    ),
)
