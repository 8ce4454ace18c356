"""Parts of config.json that several architectures share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.recipe.architectures.row import REQUIRED, ConfigKeys, UnusableConfig, layers_of, only, same, shown
from megatron_rl.recipe.model import ModelConfig
from megatron_rl.recipe.model_parts import KEYS_OF_SCALING, RopeScaling

_NEEDED = {"llama3": KEYS_OF_SCALING["llama3"], "yarn": ("factor",), "linear": ("factor",), "dynamic": ("factor",)}


def decoder(head_dim: int | None = None, epsilon: float = 1e-6) -> tuple[ConfigKeys, ...]:
    """Keys of a decoder with grouped-query attention.

    head_dim: what transformers takes where it is missing; None: hidden_size / num_attention_heads.
    epsilon: see `undivided`.
    """
    return (*undivided(epsilon=epsilon), heads(head_dim))


def undivided(
    quantised: tuple[str, ...] = (),
    ffn: str = "intermediate_size",
    *,
    act: tuple[str, str] = ("hidden_act", "silu"),
    tied: bool = False,
    epsilon: float = 1e-6,
) -> tuple[ConfigKeys, ...]:
    """Keys of a decoder, except those of its heads.

    quantised: methods (quant_method) of quantised weights that can be read.
    ffn: key of the width of feed-forward networks.
    act: key and supported value of their activation.
    tied, epsilon: what transformers takes for a missing tie_word_embeddings and rms_norm_eps.
    """
    return (
        same("num_layers", "num_hidden_layers"),
        same("hidden_size", "hidden_size"),
        same("ffn_hidden_size", ffn),
        same("max_position_embeddings", "max_position_embeddings"),
        same("vocab_size", "vocab_size"),
        same("layernorm_epsilon", "rms_norm_eps", epsilon),
        same("tied_embeddings", "tie_word_embeddings", tied),
        only(*act, written=True),
        _quantised(quantised),
    )


def _quantised(methods: tuple[str, ...]) -> ConfigKeys:
    def read(raw: Mapping[str, Any]) -> dict[str, Any]:
        given = raw["quantization_config"]
        if given and (not isinstance(given, dict) or given.get("quant_method") not in methods):
            raise UnusableConfig("the weights are quantised (quantization_config): use those that are not")
        return {}

    return ConfigKeys({"quantization_config": None}, read, lambda _: {})


def heads(head_dim: int | None) -> ConfigKeys:
    def read(raw: Mapping[str, Any]) -> dict[str, Any]:
        heads = raw["num_attention_heads"]
        groups = heads if raw["num_key_value_heads"] is None else raw["num_key_value_heads"]
        return {"num_attention_heads": heads, "num_query_groups": groups, "head_dim": raw["head_dim"]}

    def write(model: ModelConfig) -> dict[str, Any]:
        return {
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": model.num_query_groups,
            "head_dim": model.head_size,
        }

    keys = {"num_attention_heads": REQUIRED, "num_key_value_heads": None, "head_dim": head_dim}
    names = {
        "num_attention_heads": "num_attention_heads",
        "num_query_groups": "num_key_value_heads",
        "head_dim": "head_dim",
    }
    return ConfigKeys(keys, read, write, names)


def rotation(
    *, partial: float = 1.0, scaled: Mapping[str, Any] | None = None, base: float = 1e4, ignored: tuple[str, ...] = ()
) -> ConfigKeys:
    """Rotary positions, in `rope_parameters` since transformers 5 and in several keys before.

    partial: partial_rotary_factor where it is missing.
    scaled: rope_parameters where they are missing; None: positions are not scaled.
    base: rope_theta where it is missing.
    ignored: keys of rope_parameters that do not change the forward pass.
    """

    def read(raw: Mapping[str, Any]) -> dict[str, Any]:
        newer, older = raw["rope_parameters"], raw["rope_scaling"]
        if newer and older and newer != older:  # transformers would read one of them
            raise UnusableConfig("rope_parameters and rope_scaling differ: leave one of them")
        given = newer or older or scaled or {}
        where = "rope_parameters" if newer else "rope_scaling"
        if not isinstance(given, dict):
            raise UnusableConfig(f"{where} {shown(given)} is not an object")
        theta, factor = given.get("rope_theta", raw["rope_theta"]), given.get("partial_rotary_factor")
        if isinstance(theta, bool) or not isinstance(theta, int | float):
            raise UnusableConfig(f"rope_theta {shown(theta)} is not a number")
        factor = raw["partial_rotary_factor"] if factor is None else factor
        return {
            "rope_base": float(theta),
            "rope_scaling": scaling(given, where, ignored),
            "partial_rotary_factor": partial if factor is None else factor,
        }

    def write(model: ModelConfig) -> dict[str, Any]:
        factor = None if model.partial_rotary_factor == partial else model.partial_rotary_factor
        unscaled = {"rope_type": "default"} if scaled else None
        return {
            "rope_theta": model.rope_base,
            "rope_scaling": unscaled if model.rope_scaling is None else written_scaling(model.rope_scaling),
            "partial_rotary_factor": factor,
        }

    keys = {"rope_theta": base, "rope_scaling": None, "rope_parameters": None, "partial_rotary_factor": None}
    names = {
        "rope_base": "rope_theta",
        "rope_scaling": "rope_scaling",
        "partial_rotary_factor": "partial_rotary_factor",
    }
    return ConfigKeys(keys, read, write, names)


def scaling(given: Mapping[str, Any], where: str, ignored: tuple[str, ...] = ()) -> dict[str, Any] | None:
    """Keys of RopeScaling that follow from rope_parameters or rope_scaling; None for plain positions.

    where: name of the object, for messages. Raises UnusableConfig.
    """
    usual = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *ignored}
    further = {key: value for key, value in given.items() if key not in usual and value is not None}
    if not {"rope_type", "type"} & given.keys():
        if further:
            raise UnusableConfig(
                f"{where} has {', '.join(sorted(further))} and no rope_type: add the type that the model was "
                "trained with"
            )
        return None
    kind = given.get("rope_type", given.get("type"))
    if kind == "default":
        return None
    if kind not in KEYS_OF_SCALING:
        raise UnusableConfig(
            f"rotary positions of type {shown(kind)} are not supported: default, {', '.join(KEYS_OF_SCALING)} are"
        )
    if missing := [key for key in _NEEDED[kind] if further.get(key) is None]:
        raise UnusableConfig(f"{where} has no {', '.join(missing)}")
    if unknown := sorted(further.keys() - {*KEYS_OF_SCALING[kind]}):
        raise UnusableConfig(f"{where} has {unknown[0]}, which is not known for positions of type {kind}")
    return {"type": kind, **{key: further[key] for key in KEYS_OF_SCALING[kind] if key in further}}


def written_scaling(scaled: RopeScaling) -> dict[str, Any]:
    values = {key: getattr(scaled, key) for key in KEYS_OF_SCALING[scaled.type]}
    return {"rope_type": scaled.type, **{key: value for key, value in values.items() if value is not None}}


def layer_types(*, every: int, window: int | None) -> ConfigKeys:
    """Full attention in every `every`-th layer and a sliding window in the others, unless layer_types says otherwise.

    window: what transformers takes for a missing sliding_window.
    """
    usual = {"full_attention", "sliding_attention"}

    def read(raw: Mapping[str, Any]) -> dict[str, Any]:
        given = raw["layer_types"]
        if given is None:
            given = ["sliding_attention" if number % every else "full_attention" for number in layers_of(raw)]
        if not isinstance(given, list) or (unknown := [each for each in given if each not in usual]):
            raise UnusableConfig(f"layer_types has {shown(unknown[0] if isinstance(given, list) else given)}")
        windowed = "sliding_attention" in given
        return {
            "layer_types": given if windowed else None,
            "sliding_window": raw["sliding_window"] if windowed else None,
        }

    def write(model: ModelConfig) -> dict[str, Any]:
        full = ["full_attention"] * model.num_layers
        return {"layer_types": model.layer_types or full, "sliding_window": model.sliding_window}

    names = {"layer_types": "layer_types", "sliding_window": "sliding_window"}
    return ConfigKeys(
        {"num_hidden_layers": REQUIRED, "layer_types": None, "sliding_window": window}, read, write, names
    )


def attention_bias(**fields: bool) -> ConfigKeys:
    """attention_bias of config.json. fields: keys of ModelConfig that it sets."""

    def write(model: ModelConfig) -> dict[str, Any]:
        return {"attention_bias": True if all(getattr(model, key) for key in fields) else None}

    keys = dict.fromkeys(fields, "attention_bias")
    return ConfigKeys(
        {"attention_bias": False}, lambda raw: dict.fromkeys(fields, raw["attention_bias"] is True), write, keys
    )
