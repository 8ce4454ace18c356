"""Architecture of published models as a row: what its config.json says, and how its tensors are called. No torch.

config.json is read strictly: a key is part of the row, or known to leave the forward pass as it is, or it is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.recipe.model import ModelConfig

REQUIRED: Any = object()
"""Default of a key that config.json must have."""
MOST_LAYERS = 10_000
"""Layers of a model at most: a list with an entry for each is made before anything else is checked."""


NULL: Any = object()
"""Value of a key that config.json has as null, because transformers takes something else for a missing one."""


class UnusableConfig(ValueError):
    """A config.json describes a model that cannot be built here."""


@dataclass(frozen=True, slots=True)
class ConfigKeys:
    """Keys of config.json that are read and written together."""

    keys: Mapping[str, Any]  # key -> what transformers takes for a missing one
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    """Values of all keys -> keys of ModelConfig. Raises UnusableConfig."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """Model -> keys of config.json. A key that is None is left out, and one that is NULL is null. If the part cannot
    express the model, `read` gives another one."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Key of ModelConfig -> key with the same meaning, for messages."""


def same(ours: str, theirs: str, default: Any = REQUIRED) -> ConfigKeys:
    """A key of config.json that means what a key of ModelConfig means."""
    return ConfigKeys(
        {theirs: default}, lambda raw: {ours: raw[theirs]}, lambda model: {theirs: getattr(model, ours)}, {ours: theirs}
    )


def only(theirs: str, *supported: Any, written: bool = False, why: str = "") -> ConfigKeys:
    """A key of config.json of which some values are supported; the first is the default.

    written: whether an exported config.json has the key.
    """

    def read(raw: Mapping[str, Any]) -> dict[str, Any]:
        if raw[theirs] not in supported:
            known = " and ".join(map(shown, supported)) + (" are" if len(supported) > 1 else " is")
            raise UnusableConfig(f"{theirs} {shown(raw[theirs])} is not supported: {known}{why}")
        return {}

    return ConfigKeys({theirs: supported[0]}, read, lambda _: {theirs: supported[0]} if written else {})


def always(**fixed: Any) -> ConfigKeys:
    """Keys of ModelConfig that the architecture alone determines."""
    return ConfigKeys({}, lambda _: fixed, lambda _: {}, dict.fromkeys(fixed, "architectures"))


def layers_of(raw: Mapping[str, Any]) -> range:
    """Numbers of the layers, from 1. Raises UnusableConfig."""
    count = raw["num_hidden_layers"]
    if type(count) is not int or not 0 < count <= MOST_LAYERS:
        raise UnusableConfig(f"num_hidden_layers {shown(count)} is not a number from 1 to {MOST_LAYERS}")
    return range(1, count + 1)


def shown(value: Any) -> str:
    """Return a value of config.json as a message shows it."""
    return value if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True, slots=True)
class PredictionNames:
    """Names of a prediction layer, without `.weight`; {number} counts it behind the model's own layers. The defaults
    are those of DeepSeek-V3."""

    layer: str = "model.layers.{number}"
    """Prefix of the decoder layer inside."""
    token_norm: str = "model.layers.{number}.enorm"
    hidden_norm: str = "model.layers.{number}.hnorm"
    projection: str = "model.layers.{number}.eh_proj"
    norm: str = "model.layers.{number}.shared_head.norm"
    embedding: str | None = "model.layers.{number}.embed_tokens"
    """Copy of the model's embedding; None: files have none."""
    output: str | None = "model.layers.{number}.shared_head.head"
    """Copy of the output layer; None: files have none."""


@dataclass(frozen=True, slots=True)
class HfNames:
    """Names of tensors that differ between architectures, below `model.layers.N.` or `mlp.`"""

    norms: tuple[tuple[str, str], ...] = (
        ("input_layernorm", "input_layernorm"),
        ("pre_mlp_layernorm", "post_attention_layernorm"),
    )
    """Norms of a layer, each by megatron-core's name and by transformers'."""
    body: str = "model"
    """Prefix of all tensors but the output layer's."""
    router: str = "gate"
    shared_expert: str = "shared_experts"
    delta_by_key_heads: bool = False
    """Whether delta nets have the projections of Qwen3-Next, whose rows are ordered by key heads; otherwise those of
    Qwen3.5."""
    stacked_experts: bool = False
    """Whether the experts of a layer share their tensors, in the form of gpt-oss; otherwise each has its own."""
    prediction: PredictionNames = PredictionNames()


_INERT = frozenset(
    [
        "architectures",
        "model_type",
        "auto_map",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "is_encoder_decoder",
        "is_decoder",
        "initializer_range",
        "attention_dropout",
        "hidden_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "output_router_logits",
        "router_aux_loss_coef",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "problem_type",
        "id2label",
        "label2id",
        "pretraining_tp",
        "tokenizer_class",
        "cross_attention_hidden_size",
        "add_cross_attention",
        "chunk_size_feed_forward",
        "finetuning_task",
        "transformers.js_config",
        "unsloth_version",
        "unsloth_fixed",
        "task_specific_params",
        "torchscript",
        "use_bfloat16",
    ]
)
"""Keys of config.json that do not change the forward pass of a model."""


def _is_inert(key: str) -> bool:
    """Whether a key does not change the forward pass of any model. Keys with an underscore are notes of libraries, such
    as _model_name_or_path of weights that were read from GGUF."""
    return key in _INERT or key.startswith("_") or key.endswith("_token_id")


_OUTSIDE = ("tie_word_embeddings", "quantization_config")
"""Keys that stand beside `Architecture.inside`."""


@dataclass(frozen=True, slots=True)
class Architecture:
    name: str
    """Class in transformers, as in `architectures` of config.json."""
    model_type: str
    parts: tuple[ConfigKeys, ...]
    inert: frozenset[str] = frozenset()
    """Keys of config.json, beside those of all architectures, that do not change the forward pass."""
    names: HfNames = HfNames()
    also: tuple[str, ...] = ()
    """Other values of model_type with the same class."""
    kept: tuple[str, ...] = ()
    """Prefixes of tensors that are neither trained nor run here: exports contain them as they were published."""
    inside: str | None = None
    """Key of config.json under which these keys stand, if the model is a part of another one."""
    inert_outside: frozenset[str] = frozenset()
    """Keys beside `inside`, beside those of all architectures, that do not change the forward pass."""

    def read(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of ModelConfig that follow from a config.json.

        Raises UnusableConfig if a key is missing, unknown, or has a value without a counterpart here.
        """
        raw = self._unwrapped(raw)
        known = {key for part in self.parts for key in part.keys} | self.inert
        if unknown := sorted(
            key for key, value in raw.items() if key not in known and not _is_inert(key) and value is not None
        ):
            raise UnusableConfig(
                f"{unknown[0]} {shown(raw[unknown[0]])} is not known for {self.name}, and may change the model: remove "
                "the key if it does not"
            )
        found: dict[str, Any] = {}
        for part in self.parts:
            values = {key: raw.get(key, default) for key, default in part.keys.items()}
            if missing := [key for key, value in values.items() if value is REQUIRED]:
                raise UnusableConfig(f"{missing[0]}: missing")
            try:
                found |= part.read(values)
            except UnusableConfig:
                raise
            except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
                given = ", ".join(f"{key} {shown(raw[key])}" for key in part.keys if key in raw)
                raise UnusableConfig(f"{given}: not of the types that config.json has ({error})") from error
        return found

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return a config.json that `read` turns into the shape of the model if the architecture can express it."""
        written = {"architectures": [self.name], "model_type": self.model_type}
        found: dict[str, Any] = {}
        for part in self.parts:
            found |= {key: value for key, value in part.write(model).items() if value is not None}
        found = {key: None if value is NULL else value for key, value in found.items()}
        if self.inside is None:
            return written | found
        outside = {key: found[key] for key in _OUTSIDE if key in found}
        return written | outside | {self.inside: {"model_type": f"{self.model_type}_text", **found}}

    def _unwrapped(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the keys of the model, wherever they stand."""
        if self.inside is None:
            return raw
        part = raw.get(self.inside)
        if not isinstance(part, dict):
            raise UnusableConfig(f"{self.inside}: missing, or not an object")
        outside = {key: value for key, value in raw.items() if key != self.inside and key not in self.inert_outside}
        if unknown := sorted(key for key in outside if not _is_inert(key) and key not in _OUTSIDE):
            raise UnusableConfig(f"{unknown[0]} {shown(outside[unknown[0]])} is not known for {self.name}")
        return part | {key: value for key, value in outside.items() if key in _OUTSIDE}

    def their_key(self, ours: str) -> str:
        """Key of config.json that a key of ModelConfig follows from."""
        return next((part.names[ours] for part in self.parts if ours in part.names), "architectures")
