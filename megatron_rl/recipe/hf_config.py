"""config.json of a Hugging Face model: its architecture, and its shape as keys of ModelConfig.

No torch: the launcher reads it too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from megatron_rl.contract.files import read_bytes
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.model import ModelConfig
from megatron_rl.recipe.model_parts import RopeScaling
from megatron_rl.recipe.section import PositiveFloat, PositiveInt

CONFIG_FILE = "config.json"


class UnusableWeights(ConfigurationError):
    """A directory of Hugging Face weights cannot be used. The message says which, why and what to do."""


@dataclass(frozen=True, slots=True)
class Architecture:
    name: str
    """Class in transformers, as in `architectures` of config.json."""
    model_type: str
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False


ARCHITECTURES = (
    Architecture("Qwen2ForCausalLM", "qwen2", qkv_bias=True),
    Architecture("Qwen3ForCausalLM", "qwen3", qk_norm=True),
    Architecture("LlamaForCausalLM", "llama"),
    Architecture("MistralForCausalLM", "mistral"),
    Architecture("Qwen3MoeForCausalLM", "qwen3_moe", qk_norm=True, experts=True),
)

KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "rope_base": "rope_theta",
    "rope_scaling": "rope_scaling",
    "layernorm_epsilon": "rms_norm_eps",
    "qkv_bias": "architectures",
    "qk_norm": "architectures",
    "tied_embeddings": "tie_word_embeddings",
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_ffn_hidden_size": "moe_intermediate_size",
}
"""Key of ModelConfig -> key of config.json with the same meaning."""


class HuggingFaceConfig(BaseModel):
    """Keys of config.json that matter here. Defaults are those of transformers for missing keys."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    architectures: list[str] | None = None
    model_type: str = ""
    num_hidden_layers: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    max_position_embeddings: PositiveInt
    vocab_size: PositiveInt
    rms_norm_eps: PositiveFloat = 1e-6
    rope_theta: PositiveFloat = 1e4
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    """Replaces the two keys above since transformers 5."""
    partial_rotary_factor: float = 1.0
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: PositiveInt | None = 4096
    use_sliding_window: bool | None = None
    quantization_config: dict[str, Any] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    """Name of dtype before transformers 5."""
    num_experts: PositiveInt | None = None
    num_local_experts: PositiveInt | None = None
    """Name of num_experts since transformers 5."""
    num_experts_per_tok: PositiveInt | None = None
    moe_intermediate_size: PositiveInt | None = None
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None

    @property
    def architecture(self) -> Architecture | None:
        names = self.architectures or []
        for one in ARCHITECTURES:
            if one.name in names or (not names and one.model_type == self.model_type):
                return one
        return None

    @property
    def rotation(self) -> dict[str, Any]:
        found = self.rope_parameters or self.rope_scaling or {}
        kind = found.get("rope_type", found.get("type", "default"))
        return {"rope_theta": self.rope_theta, **found, "rope_type": kind}

    @property
    def precision(self) -> Literal["fp32", "bf16"]:
        """`ModelConfig.dtype` of the published weights: any 16-bit dtype counts as bf16, and so does a missing one."""
        return "fp32" if (self.dtype or self.torch_dtype) == "float32" else "bf16"


def read_hf_config(folder: Path) -> HuggingFaceConfig:
    """Read config.json of a supported directory of weights.

    Raises UnusableWeights if it is missing or unreadable, or if the model is not supported.
    """
    path = folder / CONFIG_FILE
    try:
        raw = json.loads(read_bytes(path))
    except FileNotFoundError:
        raise UnusableWeights(f"{folder} holds no {CONFIG_FILE}: it is not a Hugging Face model") from None
    except OSError as error:
        raise UnusableWeights(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UnusableWeights(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise UnusableWeights(f"{path} is not a JSON object")
    _check_architecture(raw, path)
    try:
        config = HuggingFaceConfig.model_validate(raw)
        if problem := unsupported(config):
            raise UnusableWeights(f"{path}: {problem}")
        ModelConfig(**shape(config), init="from-scratch")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f"{key}: " for key in first["loc"])
        raise UnusableWeights(f"{path}: {where}{first['msg'].removeprefix('Value error, ')}") from error
    return config


def _check_architecture(raw: dict[str, Any], path: Path) -> None:
    """Check the architecture before all else: other architectures have other keys, whose errors do not matter."""
    names, kind = raw.get("architectures"), raw.get("model_type")
    known = [one.name for one in ARCHITECTURES]
    if names is None and kind in [one.model_type for one in ARCHITECTURES]:
        return
    if not isinstance(names, list) or not set(map(str, names)) & set(known):
        found = ", ".join(map(str, names)) if isinstance(names, list) and names else f"model_type {kind!r}"
        raise UnusableWeights(f"{path}: the architecture {found} is not supported: {', '.join(known)} are")


def unsupported(config: HuggingFaceConfig) -> str | None:
    """Return a feature of the model that the policy lacks; None if it is supported."""
    architecture, rotation = config.architecture, config.rotation
    assert architecture is not None  # _check_architecture
    if config.quantization_config:
        return "the weights are quantised (quantization_config): use those that are not"
    if config.hidden_act != "silu":
        return f"hidden_act {config.hidden_act} is not supported: silu is"
    if config.mlp_bias or (config.attention_bias and not architecture.qkv_bias):
        return "biases (attention_bias, mlp_bias) are supported for Qwen2 only"
    if untyped := _untyped(config):
        return untyped
    if rotation["rope_type"] not in ("default", "llama3"):
        return f"rotary positions of type {rotation['rope_type']} are not supported: default and llama3 are"
    if not isinstance(rotation["rope_theta"], int | float):
        return f"rope_theta {json.dumps(rotation['rope_theta'])} is not a number"
    if rotation.get("partial_rotary_factor", config.partial_rotary_factor) != 1.0:
        return "partial_rotary_factor is not supported: whole heads are rotated"
    if rotation["rope_type"] == "llama3":
        missing = [key for key in RopeScaling.model_fields if key not in rotation]
        if missing:
            return f"rope_scaling has no {', '.join(missing)}"
    if architecture.experts:
        if None in (_experts(config), config.num_experts_per_tok, config.moe_intermediate_size):
            return "num_experts, num_experts_per_tok and moe_intermediate_size must all be set"
        if config.decoder_sparse_step != 1 or config.mlp_only_layers:
            return "layers without experts (decoder_sparse_step, mlp_only_layers) are not supported beside those with"
        several = config.num_experts_per_tok != 1
        if several and not config.norm_topk_prob:
            return "norm_topk_prob false is not supported: the weights of a token's experts add up to 1 here"
        if config.norm_topk_prob and not several:
            return "norm_topk_prob true is not supported with one expert per token: its weight is its probability here"
    return None


def _untyped(config: HuggingFaceConfig) -> str | None:
    """Say that rotary positions are scaled without a type, which nobody knows how to apply; None if they are not."""
    for key, given in (("rope_parameters", config.rope_parameters), ("rope_scaling", config.rope_scaling)):
        scaled = sorted((given or {}).keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor"})
        if given and scaled and not {"rope_type", "type"} & given.keys():
            return f"{key} has {', '.join(scaled)} and no rope_type: add the type that the model was trained with"
    return None


def _experts(config: HuggingFaceConfig) -> int | None:
    return config.num_experts or config.num_local_experts


def shape(config: HuggingFaceConfig) -> dict[str, Any]:
    """Return the keys of ModelConfig that follow from config.json.

    A sliding window limits the positions, since it makes no difference within its length.
    """
    architecture, rotation = config.architecture, config.rotation
    assert architecture is not None  # read_hf_config
    scaling = {key: rotation[key] for key in RopeScaling.model_fields} if rotation["rope_type"] == "llama3" else None
    windowed = architecture.model_type == "mistral" if config.use_sliding_window is None else config.use_sliding_window
    window = config.sliding_window if windowed else None
    found: dict[str, Any] = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads or config.num_attention_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": min(config.max_position_embeddings, window or config.max_position_embeddings),
        "vocab_size": config.vocab_size,
        "rope_base": float(rotation["rope_theta"]),
        "rope_scaling": scaling,
        "layernorm_epsilon": config.rms_norm_eps,
        "qkv_bias": architecture.qkv_bias,
        "qk_norm": architecture.qk_norm,
        "tied_embeddings": config.tie_word_embeddings,
    }
    if architecture.experts:
        found["num_experts"] = _experts(config)
        found["experts_per_token"] = config.num_experts_per_tok
        found["expert_ffn_hidden_size"] = config.moe_intermediate_size
    return found


def contradictions(model: ModelConfig, config: HuggingFaceConfig, path: Path) -> list[str]:
    """Return a sentence for each difference between a recipe's model and the config.json at `path`, naming both."""
    return differences(model, ModelConfig(**shape(config), init="from-scratch"), path, KEYS)


def differences(model: ModelConfig, other: ModelConfig, path: Path, names: Mapping[str, str]) -> list[str]:
    """Return a sentence for each difference between the shapes of a recipe's model and another one.

    Args:
        path: file that describes the other model.
        names: key of ModelConfig -> key in that file.
    """
    found = []
    for key, their_key in names.items():
        attribute = "head_size" if key == "head_dim" else key
        ours, theirs = getattr(model, attribute), getattr(other, attribute)
        if ours != theirs:
            found.append(f"model.{key} {_shown(ours)} contradicts {_shown(theirs)} ({their_key}) of {path}")
    return found


def _shown(value: Any) -> str:
    return json.dumps(value.model_dump() if isinstance(value, RopeScaling) else value)


def architecture_of(model: ModelConfig) -> Architecture | None:
    """Return the architecture with a model's features; None if transformers has no such model."""
    wanted = (model.qkv_bias, model.qk_norm, model.num_experts is not None)
    return next((one for one in ARCHITECTURES if (one.qkv_bias, one.qk_norm, one.experts) == wanted), None)


def features(model: ModelConfig) -> str:
    return (
        f"qkv_bias {_shown(model.qkv_bias)}, qk_norm {_shown(model.qk_norm)} and num_experts "
        f"{_shown(model.num_experts)}"
    )


def to_hf_config(model: ModelConfig, dtype: str) -> dict[str, Any]:
    """Return a config.json for a model that was never published.

    Args:
        model: a config with `vocab_size`.
        dtype: torch's name for the dtype of the weights, such as `float32`.

    Raises ConfigurationError if transformers has no such model.
    """
    architecture = architecture_of(model)
    if architecture is None:
        raise ConfigurationError(f"transformers has no model with {features(model)}")
    config = {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        **{KEYS[key]: getattr(model, key) for key in KEYS if KEYS[key] != "architectures"},
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "use_sliding_window": False,
        "torch_dtype": dtype,
    }
    config["rope_scaling"] = {"rope_type": "llama3", **model.rope_scaling.model_dump()} if model.rope_scaling else None
    if architecture.experts:
        normed = model.experts_per_token != 1  # normalising a single weight would make it 1
        config |= {"norm_topk_prob": normed, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return {key: value for key, value in config.items() if value is not None}
