"""Megatron -> Hugging Face: safetensors for transformers, written one file at a time."""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.checkpoint.hf.folder import INDEX, SINGLE, WeightsFolder
from megatron_rl.checkpoint.hf.origin import OUTPUT_STORED, CheckpointOrigin, origin_of
from megatron_rl.checkpoint.hf.peft import ADAPTER, AdapterReader, CheckpointReader, MergedReader, save
from megatron_rl.checkpoint.hf.staging import carry, staged
from megatron_rl.checkpoint.hf.torch_dist import TorchDistReader, skeleton
from megatron_rl.contract.manifest import find_corruption, read_manifest
from megatron_rl.model.hf_mapping import Assembly, Weight, bundles, sources
from megatron_rl.model.hf_weights import EMBEDDING, HF_OUTPUT, prediction_copies, weights
from megatron_rl.model.platform.device import Device
from megatron_rl.recipe.adapters import KEY
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.hf_config import CONFIG_FILE, architecture_of, read_hf_config, to_hf_config
from megatron_rl.recipe.model import ModelConfig

GENERATION = "generation_config.json"
SHARD_BYTES = 5 * 10**9

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Converted:
    bytes: int  # bytes of the weights
    seconds: float


def to_hugging_face(
    checkpoint: Path,
    target: Path,
    platform: Device,
    *,
    shard_bytes: int = SHARD_BYTES,
    replace: bool = False,
    adapters_only: bool = False,
) -> Converted:
    """Convert the weights of a checkpoint in their stored dtypes. Holds one file of `shard_bytes` in memory, or the
    largest weight if that is more. Adapters are merged into their base, and written beside it in PEFT's format.

    Args:
        adapters_only: write the adapters alone.

    Raises:
        ConfigurationError: the model of the checkpoint is unknown, or `target` cannot be created.
        CheckpointError: the checkpoint is damaged, or does not fit its model.
        OSError: the disk is full, for example; `target` is unchanged.
    """
    started = time.monotonic()
    if not checkpoint.is_dir():
        raise ConfigurationError(f"{checkpoint}: no such directory; give a checkpoint")
    origin = origin_of(checkpoint)
    wanted = weights(origin.model)
    reader, adapters = _reader(checkpoint, origin.model, platform, adapters_only=adapters_only)
    if adapters_only and adapters is not None:
        with staged(target, adapters.manifest.bytes, replace=replace) as folder:
            written = adapters.write(folder)
        return Converted(written, time.monotonic() - started)
    together = {names[0]: names for names in bundles({name: wanted[name] for name in reader.names})}
    sizes = {
        first: sum(math.prod(wanted[name].shape) * reader.dtype(name).itemsize for name in names)
        for first, names in together.items()
    }
    copies = _copies(checkpoint, origin.model)
    sizes |= {name: sizes[ours] for name, ours in copies.items()}
    published = published_kept(origin)
    further = kept_sizes(published, sources(wanted).keys() | copies.keys()) if published else {}
    sizes |= further

    def tensors_of(first: str) -> dict[str, Tensor]:
        if first in copies:
            (copied,) = reader.read(copies[first], wanted[copies[first]])
            return {first: copied}
        if published is not None and first in further:
            return {first: published.read(first)}
        return _assembled(reader, {name: wanted[name] for name in together[first]})

    with staged(target, sum(sizes.values()), replace=replace) as folder:
        write_files(folder, sizes, shard_bytes, tensors_of)
        _describe(folder, origin, reader.dtype(EMBEDDING), predicts=bool(further) or origin.model.trains_prediction)
        if isinstance(reader, MergedReader) and adapters is not None:
            reader.check_base()
            (folder / ADAPTER).mkdir()
            adapters.write(folder / ADAPTER)
    return Converted(sum(sizes.values()), time.monotonic() - started)


def published_kept(origin: CheckpointOrigin) -> WeightsFolder | None:
    """Published files with tensors that exports keep; None if the model has none, or its files are not on this machine.

    Raises ConfigurationError if they are not, and hold other parts of a model that this one is a part of.
    """
    folder, row = origin.published, architecture_of(origin.model)
    if folder is None or row is None or not (row.kept or origin.model.prediction_layers):
        return None
    if any((folder / name).exists() for name in (INDEX, SINGLE)):
        return WeightsFolder(folder)
    if origin.model.trains_prediction and row.inside is None:
        return None
    if row.inside is not None:
        raise ConfigurationError(f"{folder} no longer holds weights: an export needs the other parts of {row.name}")
    logger.warning("%s no longer holds weights: the export has no layers that predict further tokens", folder)
    return None


def _copies(checkpoint: Path, model: ModelConfig) -> dict[str, str]:
    """Tensors that repeat a weight, each with the weight's name in megatron-core."""
    output = {HF_OUTPUT: EMBEDDING} if read_manifest(checkpoint).meta.get(OUTPUT_STORED) else {}
    return output | prediction_copies(model)


def kept_sizes(files: WeightsFolder, trained: Collection[str] = ()) -> dict[str, int]:
    """Bytes of the tensors that exports keep, by name, without those that training changed."""
    stored = {name: files.tensors[name] for name in files.kept if name not in trained}
    return {name: math.prod(each.shape) * each.dtype.itemsize for name, each in stored.items()}


def write_files(
    folder: Path, sizes: Mapping[str, int], shard_bytes: int, tensors_of: Callable[[str], dict[str, Tensor]]
) -> None:
    """Write safetensors of about `shard_bytes`, and their index if there are several.

    Args:
        sizes: bytes of the tensors that `tensors_of` returns for each name.
    """
    files = list(batches(sizes, shard_bytes))
    file_of: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors: dict[str, Tensor] = {}
        for name in names:
            tensors |= tensors_of(name)
        save(folder / file, tensors)
        file_of |= dict.fromkeys(tensors, file)
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(file_of.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _assembled(reader: CheckpointReader, found: dict[str, Weight]) -> dict[str, Tensor]:
    """Hugging Face's tensors that consist of these weights."""
    assembly = Assembly(found)
    tensors: dict[str, Tensor] = {}
    for name, weight in found.items():
        for source, matrix in zip(weight.sources, reader.read(name, weight), strict=True):
            tensors |= {theirs: each.contiguous() for theirs, each in assembly.add(source, matrix)}
    return tensors


def _reader(
    checkpoint: Path, model: ModelConfig, platform: Device, *, adapters_only: bool
) -> tuple[CheckpointReader, AdapterReader | None]:
    manifest = read_manifest(checkpoint)
    if defect := find_corruption(checkpoint, manifest.files):
        raise ConfigurationError(f"{defect}: use another checkpoint")
    if manifest.meta.get(KEY) or adapters_only:
        adapters = AdapterReader.of(checkpoint, model, platform)
        return adapters.stored if adapters_only else MergedReader(adapters, platform), adapters
    return TorchDistReader(checkpoint, skeleton(model, platform)), None


def batches(sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """Split names, without reordering, into the fewest batches of `limit` bytes. A larger weight has its own batch."""
    batch: list[str] = []
    held = 0
    for name, size in sizes.items():
        if batch and held + size > limit:
            yield batch
            batch, held = [], 0
        batch.append(name)
        held += size
    if batch:
        yield batch


def _describe(folder: Path, origin: CheckpointOrigin, dtype: torch.dtype, *, predicts: bool) -> None:
    """Write the files that transformers needs beside the weights. config.json names the dtype and comes last.

    predicts: whether layers that predict further tokens are among the weights.
    """
    for source in dict.fromkeys([origin.published, origin.tokenizer]):
        if source is not None:
            carry(source, folder)
    _describe_ends(folder / GENERATION, origin.ends)
    name = str(dtype).removeprefix("torch.")
    model = origin.model if predicts else origin.model.model_copy(update={"prediction_layers": 0})
    if origin.published is None:  # a config.json beside the tokenizer does not describe the weights
        config = to_hf_config(model, name)
    else:
        shutil.copyfile(origin.published / CONFIG_FILE, folder / CONFIG_FILE)
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        changes: dict[str, Any] = {"dtype" if "dtype" in config else "torch_dtype": name}
        predictions = read_hf_config(folder).architecture.their_key("prediction_layers")
        if model != origin.model and predictions in config:
            changes[predictions] = 0
        quantised = config.pop("quantization_config", None)  # an export is not
        if not quantised and all(config.get(key, value) == value for key, value in changes.items()):
            return  # identical to the published file
        config |= changes
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _describe_ends(file: Path, ends: frozenset[int]) -> None:
    """Have generation end where the model was trained to end: servers and transformers read the tokens here. A file
    that names them all stays as it was published."""
    config = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    given = config.get("eos_token_id")
    known = [] if given is None else given if isinstance(given, list) else [given]
    if further := sorted(ends - {*known}):
        file.write_text(json.dumps({**config, "eos_token_id": [*known, *further]}, indent=2) + "\n", encoding="utf-8")
