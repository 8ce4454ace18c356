"""Weights of a checkpoint in torch_dist format, written and read tensor by tensor without a model in memory."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from torch import Tensor

from megatron_rl.checkpoint.shards import METADATA, Snapshot, WrittenPart, write_metadata, write_part
from megatron_rl.checkpoint.stored_shards import StoredShards
from megatron_rl.contract.manifest import CheckpointError, FileRecord
from megatron_rl.model.hf_mapping import Weight, matrices_of
from megatron_rl.model.platform.device import Device
from megatron_rl.model.policy import Policy, build_policy
from megatron_rl.recipe.model import ModelConfig


def skeleton(model: ModelConfig, platform: Device) -> Policy:
    """Build the whole policy on the meta device. Needs megatron-core's groups for one rank."""
    without_memory = copy.copy(platform)
    without_memory.device = torch.device("meta")
    assert model.vocab_size is not None
    with torch.device("meta"):
        return build_policy(model, model.vocab_size, without_memory)


def _split(policy: Policy) -> tuple[dict[str, Any], list[ShardedObject]]:
    """Weights by name, and the empty object that megatron-core saves for each linear."""
    items = policy.sharded_state_dict()
    objects = [item for item in items.values() if isinstance(item, ShardedObject)]
    return {name: item for name, item in items.items() if not isinstance(item, ShardedObject)}, objects


def _shards(item: Any, data: Tensor | None = None) -> list[ShardedTensor]:
    """Shards of one weight in a checkpoint: some weights are stored in two. A layer of a tensor that stacks all layers
    becomes [1, ...]: in megatron-core's own form torch would need the ranks with the other layers."""
    if data is not None:
        typed = {"dtype": data.dtype} if isinstance(item, ShardedTensor) else {}  # a factory has no dtype
        item = dataclasses.replace(item, data=data, **typed)
    (found,) = save_preprocess({"": item}, validate_access_integrity=False)[0].values()
    shards = []
    for shard in found if isinstance(found, list) else [found]:
        size = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
        shards.append(dataclasses.replace(shard, data=shard.data.view(size), local_shape=size, prepend_axis_num=0))
    return shards


class TorchDistWriter:
    """Writes the weights of a policy into a folder in several calls, each in the role of another rank."""

    def __init__(self, folder: Path, policy: Policy) -> None:
        self._folder = folder
        self._items, self._objects = _split(policy)
        self._parts: list[WrittenPart] = []
        self._dtypes: dict[str, torch.dtype] = {}
        self.shapes = {name: tuple(item.data.shape) for name, item in self._items.items()}
        """Shapes of the weights to write, by megatron-core's names, with padding."""

    def write(self, names: Iterable[str], read: Callable[[str], Tensor]) -> None:
        """Write weights, read one by one. All of a call are in memory at once.

        Raises CheckpointError if layers that share a tensor of the checkpoint have different dtypes.
        """
        held: dict[str, list[Any]] = {} if self._parts else {one.unique_key: [one] for one in self._objects}
        for name in names:
            for shard in _shards(self._items[name], read(name)):
                if self._dtypes.setdefault(shard.key, shard.dtype) != shard.dtype:
                    raise CheckpointError(f"{name} is {shard.dtype} and in other layers {self._dtypes[shard.key]}")
                if shard.data.untyped_storage().nbytes() != shard.data.nbytes:
                    shard.data = shard.data.clone()  # torch.save writes whole storages
                held.setdefault(shard.key, []).append(shard)
        self._parts.append(write_part(self._folder, Snapshot(held, {}), len(self._parts), lambda: None))

    def finish(self) -> dict[str, FileRecord]:
        """Write the index. Returns a record of every file."""
        files = {name: record for part in self._parts for name, record in part.files.items()}
        return files | {METADATA: write_metadata(self._folder, self._parts, lambda: None)}


class TorchDistReader:
    def __init__(self, folder: Path, policy: Policy, only: Collection[str] | None = None) -> None:
        """only: names of the weights to read; default: all. Raises CheckpointError if the checkpoint belongs to another
        model."""
        self._folder = folder
        items = _split(policy)[0].items()
        self._shards = {name: _shards(item) for name, item in items if only is None or name in only}
        with self._fitting():
            self._stored = StoredShards(folder)
            for name in self.names:
                self.dtype(name)

    @property
    def names(self) -> list[str]:
        return list(self._shards)

    def dtype(self, name: str) -> torch.dtype:
        return self._stored.tensor(self._shards[name][0].key).properties.dtype

    def read(self, name: str, weight: Weight) -> list[Tensor]:
        """Read the sources of a weight.

        Raises CheckpointError if the checkpoint lacks a part of it.
        """
        tensor = torch.empty(weight.shape, dtype=self.dtype(name))
        wanted, first = [], 0
        with self._fitting():
            for shard in self._shards[name]:
                axis = len(shard.local_shape) - tensor.dim()
                last = min(first + shard.local_shape[axis], len(tensor))
                data = tensor[first:last].view((1,) * axis + (last - first, *tensor.shape[1:]))
                first = last
                size = tuple(self._stored.tensor(shard.key).size)  # padded by other ranks
                wanted.append(ShardedTensor(shard.key, data, data.dtype, data.shape, size, shard.global_offset, None))
            self._stored.read(wanted)
        return matrices_of(weight, tensor)

    @contextmanager
    def _fitting(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise CheckpointError(f"{self._folder} does not fit this model: {error}") from error
