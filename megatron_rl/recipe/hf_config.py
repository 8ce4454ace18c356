"""config.json of a Hugging Face model: its architecture, and its shape as keys of ModelConfig.

No torch: the launcher reads it too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from megatron_rl.contract.bounded_json import bounded_json
from megatron_rl.contract.files import read_bytes
from megatron_rl.recipe.architectures.row import Architecture, HfNames, UnusableConfig
from megatron_rl.recipe.architectures.rows import ARCHITECTURES
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.model import ModelConfig

CONFIG_FILE = "config.json"
_NOT_OF_WEIGHTS = {
    "architecture",
    "vocab_multiple",
    "prediction_loss_coefficient",
    "router_replay",
    "router_bias_update_rate",
}
_FIELDS = list(ModelConfig.model_fields)
SHAPE_KEYS = tuple(key for key in _FIELDS[: _FIELDS.index("fp32_output")] if key not in _NOT_OF_WEIGHTS)
"""Keys of ModelConfig that published weights determine."""


MOST_DIGITS = 19
"""Digits of the whole numbers that a config.json may have, as in recipes."""


class UnusableWeights(ConfigurationError):
    """A directory of Hugging Face weights cannot be used. The message says which, why and what to do."""


@dataclass(frozen=True, slots=True)
class PublishedConfig:
    """A config.json that can be used."""

    architecture: Architecture
    shape: dict[str, Any]
    """Keys of ModelConfig that follow from it."""
    precision: Literal["fp32", "bf16"]
    """`ModelConfig.dtype` of the published weights: any 16-bit dtype counts as bf16, and so does a missing one."""
    quantization: Mapping[str, Any] | None
    """quantization_config of weights that are stored quantised; None for all others."""

    def model(self, **fields: Any) -> ModelConfig:
        """Return the model, with other fields than those of its shape."""
        return ModelConfig(**{**self.shape, "init": "from-scratch", **fields})


def read_hf_config(folder: Path) -> PublishedConfig:
    """Read config.json of a supported directory of weights.

    Raises UnusableWeights if it is missing or unreadable, or if the model is not supported.
    """
    path = folder / CONFIG_FILE
    try:
        raw = bounded_json(read_bytes(path), parse_int=_whole)
    except FileNotFoundError:
        raise UnusableWeights(f"{folder} holds no {CONFIG_FILE}: it is not a Hugging Face model") from None
    except OSError as error:
        raise UnusableWeights(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UnusableWeights(f"{path} is not JSON of a model: {error}") from error
    if not isinstance(raw, dict):
        raise UnusableWeights(f"{path} is not a JSON object")
    try:
        return published_config(raw)
    except UnusableConfig as error:
        raise UnusableWeights(f"{path}: {error}") from error


def _whole(text: str) -> int:
    """Parse a whole number. Sizes beyond floats would end the arithmetic of shapes and memory by an OverflowError."""
    if len(text) > MOST_DIGITS:
        raise ValueError(f"it has a number of {len(text)} digits")
    return int(text)


def published_config(raw: Mapping[str, Any]) -> PublishedConfig:
    """Interpret the keys of a config.json. Raises UnusableConfig."""
    row = _row(raw)
    shape = row.read(raw)
    try:
        model = ModelConfig(**shape, init="from-scratch")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f"{row.their_key(str(key))}: " for key in first["loc"][:1])
        raise UnusableConfig(f"{where}{first['msg'].removeprefix('Value error, ')}") from error
    if names_of(model) != row.names:
        shape["architecture"] = row.model_type
    fp32 = (raw.get("dtype") or raw.get("torch_dtype")) == "float32"
    return PublishedConfig(row, shape, "fp32" if fp32 else "bf16", raw.get("quantization_config") or None)


def _row(raw: Mapping[str, Any]) -> Architecture:
    names, kind = raw.get("architectures"), raw.get("model_type")
    for row in ARCHITECTURES:
        if row.name in names if isinstance(names, list) else names is None and kind in (row.model_type, *row.also):
            return row
    found = ", ".join(map(str, names)) if isinstance(names, list) and names else f"model_type {kind!r}"
    known = ", ".join(row.name for row in ARCHITECTURES)
    raise UnusableConfig(f"the architecture {found} is not supported: {known} are")


def contradictions(model: ModelConfig, config: PublishedConfig, path: Path) -> list[str]:
    """Return a sentence for each difference between a recipe's model and the config.json at `path`, naming both."""
    return differences(model, config.model(), path, config.architecture.their_key)


def differences(model: ModelConfig, other: ModelConfig, path: Path, name: Callable[[str], str]) -> list[str]:
    """Return a sentence for each difference between the shapes of a recipe's model and another one.

    Args:
        path: file that describes the other model.
        name: key of ModelConfig -> key in that file.
    """
    found = []
    for key in SHAPE_KEYS:
        attribute = "head_size" if key == "head_dim" else key
        ours, theirs = getattr(model, attribute), getattr(other, attribute)
        if ours != theirs:
            found.append(f"model.{key} {_shown(ours)} contradicts {_shown(theirs)} ({name(key)}) of {path}")
    return found


def _shown(value: Any) -> str:
    return json.dumps(value.model_dump(exclude_defaults=True) if isinstance(value, BaseModel) else value)


def architecture_of(model: ModelConfig) -> Architecture | None:
    """Return the architecture that expresses a model: that of `model.architecture`, or else the first; None if
    transformers has no such model."""
    rows = [row for row in ARCHITECTURES if model.architecture in (None, row.model_type, *row.also)]
    return next((row for row in rows if _expresses(row, model)), None)


def _expresses(row: Architecture, model: ModelConfig) -> bool:
    model = model.model_copy(update={"vocab_size": model.vocab_size or 1})  # any would do
    try:
        other = ModelConfig(**row.read(row.write(model)), init="from-scratch")
    except ValueError:  # UnusableConfig, or the keys are those of no model
        return False
    return not differences(model, other, Path(), str)


def names_of(model: ModelConfig) -> HfNames:
    """Return the names of a model's tensors."""
    row = architecture_of(model)
    return HfNames() if row is None else row.names


def features(model: ModelConfig) -> str:
    """Return what distinguishes a model from other architectures, for messages."""
    usual = ("qkv_bias", "qk_norm", "num_experts")
    told = {"num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"} | {
        "head_dim",
        "max_position_embeddings",
        "vocab_size",
        "rope_base",
        "layernorm_epsilon",
        "tied_embeddings",
    }
    given = [
        key
        for key in SHAPE_KEYS
        if key in usual or (key not in told and getattr(model, key) != ModelConfig.model_fields[key].default)
    ]
    listed = [f"{key} {_shown(getattr(model, key))}" for key in given]
    return " and ".join([", ".join(listed[:-1]), listed[-1]])


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
    return architecture.write(model) | {"torch_dtype": dtype}
