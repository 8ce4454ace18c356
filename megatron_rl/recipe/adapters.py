"""Adapters in a checkpoint's manifest: which they are, and the base that they belong to.

A checkpoint of adapters holds nothing of the base. The manifest names it, and `initial_weights` beside it is a checksum
of its weights (`weights_checksum`): beside other weights, the adapters would be meaningless.

No torch: a launcher refuses a recipe that starts from adapters alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.lora_section import LoraConfig
from megatron_rl.recipe.model import ModelConfig

KEY = "adapters"  # key of the record in a manifest's meta
_MERGED = {
    "model.checkpoint": "start from model.init=huggingface model.huggingface=DIR",
    "distill.teacher": "give distill.teacher=DIR",
}
"""Key of the recipe that names a checkpoint -> the keys that name an export of it."""


def adapter_record(model: ModelConfig) -> dict[str, Any] | None:
    """Return the record of a model's adapters: `model.lora` without dropout, and `base`, the path or name of the
    weights that they change. None without adapters."""
    if model.lora is None:
        return None
    base = {"huggingface": model.huggingface, "checkpoint": model.checkpoint}.get(model.init) or f"init {model.init}"
    return {**model.lora.model_dump(exclude={"dropout"}), "base": base}


def check_whole(folder: Path, meta: Mapping[str, Any], key: str = "model.checkpoint") -> None:
    """Raise ConfigurationError if a checkpoint that initial weights are read from holds adapters alone.

    key: of the recipe, `model.checkpoint` or `distill.teacher`.
    """
    if record := meta.get(KEY):
        raise ConfigurationError(
            f"{key}: {folder} holds only adapters of {record['base']} (rank {record['rank']}): merge them with "
            f"`mrl convert megatron-to-hf {folder} DIR`, and {_MERGED[key]}"
        )


def check_adapters(folder: Path, meta: Mapping[str, Any], lora: LoraConfig | None) -> None:
    """Raise ConfigurationError if a checkpoint to resume from has not exactly the adapters of the recipe."""
    record = meta.get(KEY)
    if lora is None and record is None:
        return
    if record is None:
        raise ConfigurationError(
            f"model.lora is set, and {folder} has no adapters: it holds all weights. Leave out model.lora to continue "
            "to train all of them, or start another run with model.init=checkpoint and this model.checkpoint"
        )
    if lora is None:
        raise ConfigurationError(
            f"model.lora is not set, and {folder} holds only adapters of {record['base']} (rank {record['rank']}): set "
            "model.lora as the run had it, or start another run from merged weights (`mrl convert megatron-to-hf`)"
        )
    for key, value in lora.model_dump(exclude={"dropout"}).items():
        if record[key] != value:
            raise ConfigurationError(
                f"model.lora.{key} is {value}, and the adapters in {folder} have {record[key]}: restore it, or start "
                "another run"
            )


def check_base(folder: Path, meta: Mapping[str, Any], found: str) -> None:
    """Raise ConfigurationError if weights are not those that a checkpoint's adapters belong to. found: their
    checksum."""
    if found != meta["initial_weights"]:
        raise ConfigurationError(
            f"{folder} holds adapters of {meta[KEY]['base']}, whose weights have changed since: restore them"
        )
