"""Adapters in a checkpoint's manifest: which they are, and the base that they belong to.

A checkpoint of adapters holds nothing of the base. The manifest names it, and `initial_weights` beside it is a checksum
of its weights: beside other weights, the adapters would be meaningless.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.errors import ConfigurationError
from megatron_rl.model.config import LoraConfig, ModelConfig
from megatron_rl.model.hf_mapping import OUTPUT
from megatron_rl.model.hf_parts import held_weights
from megatron_rl.model.policy import Policy

KEY = "adapters"
"""Key of the record in a manifest's meta."""
_BITS = {2: torch.int16, 4: torch.int32}


def adapter_record(model: ModelConfig) -> dict[str, Any] | None:
    """Return the record of a model's adapters: `model.lora` without dropout, and `base`, the path or name of the
    weights that they change. None without adapters."""
    if model.lora is None:
        return None
    base = {"huggingface": model.huggingface, "checkpoint": model.checkpoint}.get(model.init) or f"init {model.init}"
    return {**model.lora.model_dump(exclude={"dropout"}), "base": base}


def check_whole(folder: Path, meta: Mapping[str, Any]) -> None:
    """Raise ConfigurationError if a checkpoint that initial weights are read from holds adapters alone."""
    if record := meta.get(KEY):
        raise ConfigurationError(
            f"model.checkpoint: {folder} holds only adapters of {record['base']} (rank {record['rank']}): merge them "
            f"with `mrl convert megatron-to-hf {folder} DIR`, and start from model.huggingface=DIR"
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


def weights_checksum(policy: Policy, model: ModelConfig, control: dist.ProcessGroup) -> str:
    """Checksum of all weights except adapters, the same in every layout. Collective over all ranks, which are those of
    `control`. Of ranks with the same part, the first counts."""
    own = 0
    for held in held_weights(policy, model):
        counted = held.copies.rank() == 0 and (held.weight.split is not None or held.ranks.rank() == 0)
        if counted and not (held.name == OUTPUT and model.tied_embeddings):
            for piece in held.pieces():
                own += checksum(piece.source.name, piece.view)
    total = torch.tensor([(own + 2**63) % 2**64 - 2**63])  # int64 adds modulo 2^64
    dist.all_reduce(total, group=control)
    return checksum_text(int(total))


def checksum(name: str, part: Tensor) -> int:
    """Checksum of a part of a tensor, by Hugging Face's name: the sum of its bits, times a factor of its name. The
    checksums of all parts add up to that of the whole, modulo 2^64."""
    bits = part.contiguous().view(_BITS[part.element_size()])
    return int(bits.sum(dtype=torch.int64)) * zlib.crc32(name.encode())


def checksum_text(total: int) -> str:
    """Checksum of a model as a manifest has it."""
    return f"sum-{total & (2**64 - 1):016x}"
