"""Hugging Face -> Megatron: a checkpoint for any layout, or Megatron-LM's own tensor-parallel shards."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from megatron_rl.checkpoint.hf import megatron_lm
from megatron_rl.checkpoint.hf.folder import WeightsFolder
from megatron_rl.checkpoint.hf.pretrained import fill, has_equal_output
from megatron_rl.checkpoint.hf.staging import carry, staged, sync
from megatron_rl.checkpoint.hf.torch_dist import TorchDistWriter, skeleton
from megatron_rl.contract.manifest import Manifest, hash_file, write_manifest
from megatron_rl.contract.paths import CARRIED
from megatron_rl.model.hf_mapping import Weight, sources, weights
from megatron_rl.model.platform.device import Device
from megatron_rl.model.tokenizer import load_pretrained_tokenizer
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.hf_config import CONFIG_FILE, UnusableWeights, shape
from megatron_rl.recipe.model import ModelConfig

NOTES = "conversion.json"  # file among the carried ones with facts that only the weights show
VOCAB_MULTIPLE = 128  # divides the padded embedding's rows, as in the shipped recipes and in Megatron-LM (per rank)

Format = Literal["torch_dist", "torch"]


@dataclass(frozen=True, slots=True)
class Converted:
    bytes: int  # bytes of the weights
    seconds: float


def to_megatron(
    source: Path,
    target: Path,
    platform: Device,
    *,
    tp: int = 1,
    kind: Format = "torch_dist",
    shard_bytes: int,
    replace: bool = False,
) -> Converted:
    """Convert a directory of Hugging Face weights. Holds `shard_bytes` in memory, or the largest weight if that is
    more; with `kind` torch one tensor-parallel shard.

    Raises:
        ConfigurationError: `source` cannot be used or does not divide by `tp`, or `target` cannot be created.
        OSError: the disk is full, for example; `target` is unchanged.
    """
    files = WeightsFolder(source)
    multiple = VOCAB_MULTIPLE * tp if kind == "torch" else math.lcm(VOCAB_MULTIPLE, tp)
    model = ModelConfig(**shape(files.config), init="from-scratch", vocab_multiple=multiple)
    wanted = weights(model)
    files.check(sources(wanted).values(), tied=model.tied_embeddings)
    check_tokenizer(source, files.config.vocab_size)
    if undivided := next(model.undivided(tp), None):
        raise ConfigurationError(f"{undivided}: choose a --tp that does")
    notes = {"output_layer_stored": model.tied_embeddings and has_equal_output(files)}
    size = sum(math.prod(stored.shape) * stored.dtype.itemsize for stored in files.tensors.values())
    started = time.monotonic()
    with staged(target, size, replace=replace) as folder:
        carried = folder / CARRIED
        carried.mkdir()
        carry(source, carried)
        (carried / NOTES).write_text(json.dumps(notes) + "\n", encoding="utf-8")
        if kind == "torch":
            megatron_lm.write(folder, model, wanted, files, tp)
        else:
            _write_torch_dist(folder, model, wanted, files, platform, shard_bytes, started)
    return Converted(size, time.monotonic() - started)


def _write_torch_dist(
    folder: Path,
    model: ModelConfig,
    wanted: dict[str, Weight],
    files: WeightsFolder,
    platform: Device,
    shard_bytes: int,
    started: float,
) -> None:
    writer = TorchDistWriter(folder, skeleton(model, platform))
    shapes = writer.shapes
    sizes = {name: math.prod(shapes[name]) * dtype_of(name, wanted[name], files).itemsize for name in shapes}
    for names in batches(sizes, shard_bytes):
        writer.write(names, lambda name: whole(name, wanted[name], shapes[name], files))
    records = writer.finish()
    sync(folder / CARRIED)
    carried = [path for path in (folder / CARRIED).rglob("*") if path.is_file()]
    records |= {str(path.relative_to(folder)): hash_file(path) for path in carried}
    seconds = time.monotonic() - started
    write_manifest(folder, Manifest(0, f"converted-{secrets.token_hex(4)}", 1, None, 0.0, seconds, {}, records))


def whole(name: str, weight: Weight, size: Iterable[int], files: WeightsFolder) -> Tensor:
    """Read one of megatron-core's weights in its published dtype."""
    tensor = torch.empty(tuple(size), dtype=dtype_of(name, weight, files))
    fill(tensor, weight, files)
    return tensor


def dtype_of(name: str, weight: Weight, files: WeightsFolder) -> torch.dtype:
    """Dtype of a weight's parts. Raises UnusableWeights if they differ."""
    types = {files.tensors[source.name].dtype for source in weight.sources}
    if len(types) > 1:
        parts = ", ".join(source.name for source in weight.sources)
        raise UnusableWeights(f"{files.folder}: {parts} have different types, but {name} combines them in one tensor")
    return types.pop()


def batches(sizes: dict[str, int], limit: int) -> Iterator[list[str]]:
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


def check_tokenizer(folder: Path, vocab_size: int) -> None:
    """Raise UnusableWeights if the tokenizer is missing or has more tokens than the embedding has rows."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise UnusableWeights(f"{folder} is incomplete: it holds no tokenizer (tokenizer.json)")
    try:
        tokens = len(load_pretrained_tokenizer(folder))
    except (OSError, ValueError) as error:
        raise UnusableWeights(f"{folder} holds no tokenizer that can be used: {error}") from error
    if tokens > vocab_size:
        raise UnusableWeights(
            f"{folder}: the tokenizer has {tokens} tokens, but the embedding {vocab_size} rows (vocab_size of "
            f"{CONFIG_FILE}): one of them belongs to another model"
        )
