"""Recipe keys of parts that some models have: scaled rotary positions, latent attention, a router, gated delta nets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from megatron_rl.recipe.section import NonNegativeFloat, PositiveFloat, PositiveInt, Section

LayerType = Literal["full_attention", "sliding_attention", "linear_attention"]
"""Attention of a layer, as in `layer_types` of config.json."""


KEYS_OF_SCALING: Mapping[str, tuple[str, ...]] = {
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "truncate",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
    ),
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
}
"""Type of scaled rotary positions -> its keys."""


class RopeScaling(Section):
    """Rotary frequencies for more positions than in pretraining, as transformers computes them for `rope_type`."""

    type: Literal["llama3", "yarn", "linear", "dynamic"] = "llama3"
    """llama3: slow frequencies are divided (arXiv 2407.21783). yarn: arXiv 2309.00071. linear: positions are divided
    (arXiv 2306.15595). dynamic: as unscaled up to `max_position_embeddings`, which is the limit here."""
    factor: Annotated[float, Field(ge=1)]
    """Factor by which the positions are stretched."""
    original_max_position_embeddings: PositiveInt | None = None
    """Positions that the model knew before scaling, in tokens (llama3, yarn); default: 8192 for llama3,
    `max_position_embeddings` for yarn."""
    low_freq_factor: PositiveFloat = 1.0
    """Wavelengths above original_max_position_embeddings / low_freq_factor are stretched by the full factor
    (llama3)."""
    high_freq_factor: PositiveFloat = 4.0
    """Wavelengths below original_max_position_embeddings / high_freq_factor stay (llama3). In between, the factor is
    interpolated."""
    beta_fast: PositiveFloat = 32.0
    """Turns over the original positions from which on a frequency stays (yarn)."""
    beta_slow: PositiveFloat = 1.0
    """Turns over the original positions up to which a frequency is divided by the full factor (yarn)."""
    truncate: bool = True
    """Round both bounds to whole dimensions (yarn)."""
    attention_factor: NonNegativeFloat | None = None
    """Factor of cosines and sines (yarn); default: 0.1 ln(factor) + 1, or the ratio that mscale and mscale_all_dim
    give."""
    mscale: NonNegativeFloat | None = None
    """Coefficient of ln(factor) in the numerator of attention_factor (yarn)."""
    mscale_all_dim: NonNegativeFloat | None = None
    """The same in its denominator; latent attention also multiplies its scores by its square (yarn)."""

    @model_validator(mode="before")
    @classmethod
    def _positions_of_llama(cls, values: Any) -> Any:
        key = "original_max_position_embeddings"
        if isinstance(values, dict) and values.get("type", "llama3") == "llama3" and values.get(key) is None:
            return values | {key: 8192}
        return values

    @model_validator(mode="after")
    def _keys_of_type(self) -> RopeScaling:
        for key, field in type(self).model_fields.items():
            known = key == "type" or key in KEYS_OF_SCALING[self.type]
            if not known and getattr(self, key) != field.default:
                others = ", ".join(kind for kind, keys in KEYS_OF_SCALING.items() if key in keys)
                raise ValueError(f"{key} has no effect with type {self.type}: it belongs to {others}")
        return self

    @model_validator(mode="after")
    def _ordered(self) -> RopeScaling:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor {self.high_freq_factor} must exceed low_freq_factor {self.low_freq_factor}"
            )
        return self

    @property
    def cosine_factor(self) -> float:
        """Factor of cosines and sines, and so, squared, of the scores of rotated dimensions (YaRN, section 3.4)."""
        if self.type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    @property
    def score_factor(self) -> float:
        """Factor of all scores of latent attention, of which `cosine_factor` is only a part (DeepSeek-V3)."""
        return self._magnitude(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _magnitude(self, coefficient: float) -> float:
        return 0.1 * coefficient * math.log(self.factor) + 1.0


class LatentAttention(Section):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads are products of one
    short vector per token. Keys have their names in config.json."""

    q_lora_rank: PositiveInt | None = None
    """Width of the vector that the queries of all heads are computed from; default: they are computed from the residual
    stream."""
    kv_lora_rank: PositiveInt
    """Width of the vector that keys and values of all heads are computed from."""
    qk_nope_head_dim: PositiveInt
    """Part of a head of queries and keys without positions."""
    qk_rope_head_dim: PositiveInt
    """Part of a head of queries and keys that is rotated. All heads share that of the keys."""
    v_head_dim: PositiveInt
    """Size of a head of values."""


class RouterConfig(Section):
    """Choice of each token's experts."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    """Function of the router's logits. softmax: over all experts. sigmoid: of each (DeepSeek-V3, arXiv 2412.19437)."""
    normalised: bool = True
    """Divide the scores of the chosen experts by their sum, unless there is only one."""
    scale: PositiveFloat = 1.0
    """Factor of the weights of the chosen experts (routed_scaling_factor of config.json)."""
    groups: PositiveInt = 1
    """Groups of consecutive experts (n_group of config.json)."""
    groups_per_token: PositiveInt = 1
    """Groups that a token may choose experts of: those whose two best experts have the largest sum (topk_group)."""
    correction_bias: bool = False
    """Add a bias to the scores by which experts are chosen, not to their weights (e_score_correction_bias)."""
    linear_bias: bool = False
    """Bias of the router's linear layer (gpt-oss)."""

    @model_validator(mode="after")
    def _groups_fit(self) -> RouterConfig:
        if self.groups_per_token > self.groups:
            raise ValueError(f"groups_per_token {self.groups_per_token} exceeds groups {self.groups}")
        return self


class DeltaNet(Section):
    """Gated delta net (arXiv 2412.06464) of the layers of type linear_attention."""

    key_heads: PositiveInt
    """Heads of queries and keys; must divide `value_heads` (linear_num_key_heads of config.json)."""
    value_heads: PositiveInt
    """Heads of values, gates and states (linear_num_value_heads)."""
    key_head_dim: PositiveInt
    """Size of a head of queries and keys (linear_key_head_dim)."""
    value_head_dim: PositiveInt
    """Size of a head of values (linear_value_head_dim)."""
    conv_kernel: PositiveInt = 4
    """Tokens that the causal convolution of queries, keys and values sees (linear_conv_kernel_dim)."""

    @model_validator(mode="after")
    def _heads_divide(self) -> DeltaNet:
        if self.value_heads % self.key_heads:
            raise ValueError(f"value_heads {self.value_heads} is not divisible by key_heads {self.key_heads}")
        return self
