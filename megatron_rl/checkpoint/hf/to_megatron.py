"""Hugging Face -> Megatron: a checkpoint for any layout, written one file at a time."""

from __future__ import annotations

import math
import secrets
import time
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.checkpoint.hf.folder import WeightsFolder
from megatron_rl.checkpoint.hf.origin import OUTPUT_STORED
from megatron_rl.checkpoint.hf.staging import carry, staged
from megatron_rl.checkpoint.hf.to_hf import SHARD_BYTES, Converted, batches, kept_sizes, write_files
from megatron_rl.checkpoint.hf.torch_dist import TorchDistWriter, skeleton
from megatron_rl.checkpoint.initial_weights import fill, has_equal_output
from megatron_rl.checkpoint.source import check_tokenizer
from megatron_rl.contract.manifest import Manifest, hash_file, write_manifest
from megatron_rl.contract.paths import CARRIED
from megatron_rl.model.hf_mapping import Weight, pieces, sources
from megatron_rl.model.hf_weights import weights
from megatron_rl.model.platform.device import Device
from megatron_rl.recipe.hf_config import UnusableWeights


def to_megatron(
    source: Path, target: Path, platform: Device, *, shard_bytes: int = SHARD_BYTES, replace: bool = False
) -> Converted:
    """Convert a directory of Hugging Face weights in their published dtypes. Holds `shard_bytes` in memory, or the
    largest weight if that is more.

    Raises:
        ConfigurationError: `source` cannot be used, or `target` cannot be created.
        CheckpointError: layers have different dtypes.
        OSError: the disk is full, for example; `target` is unchanged.
    """
    started = time.monotonic()
    files = WeightsFolder(source)
    model = files.config.model()
    wanted = weights(model)
    files.check(sources(wanted).values(), tied=model.tied_embeddings)
    check_tokenizer(source, files.config.shape["vocab_size"])
    meta = {OUTPUT_STORED: model.tied_embeddings and has_equal_output(files)}
    size = sum(math.prod(stored.shape) * stored.dtype.itemsize for stored in files.tensors.values())
    with staged(target, size, replace=replace) as folder:
        carry(source, folder / CARRIED)
        if further := kept_sizes(files):
            write_files(folder / CARRIED, further, shard_bytes, lambda name: {name: files.read(name)})
        records = {
            str(path.relative_to(folder)): hash_file(path) for path in (folder / CARRIED).rglob("*") if path.is_file()
        }
        writer = TorchDistWriter(folder, skeleton(model, platform))
        dtypes = {name: _dtype(name, wanted[name], files) for name in writer.shapes}
        sizes = {name: math.prod(each) * dtypes[name].itemsize for name, each in writer.shapes.items()}

        def read(name: str) -> Tensor:
            tensor = torch.empty(writer.shapes[name], dtype=dtypes[name])
            fill(tensor, wanted[name], pieces(wanted[name], tensor), files)
            return tensor

        for names in batches(sizes, shard_bytes):
            writer.write(names, read)
        records |= writer.finish()
        seconds = time.monotonic() - started
        write_manifest(folder, Manifest(0, f"converted-{secrets.token_hex(4)}", 1, None, 0.0, seconds, meta, records))
    return Converted(size, time.monotonic() - started)


def _dtype(name: str, weight: Weight, files: WeightsFolder) -> torch.dtype:
    """Dtype of a weight's parts. Raises UnusableWeights if they differ."""
    types = {files.tensors[source.tensor.name].dtype for source in weight.sources}
    if len(types) > 1:
        parts = ", ".join(sources({name: weight}))
        raise UnusableWeights(f"{files.folder}: {parts} have different types, but {name} combines them in one tensor")
    return types.pop()
