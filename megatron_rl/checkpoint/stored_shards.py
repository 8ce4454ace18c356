"""Reading the tensors and objects that one rank needs from a checkpoint in torch_dist format, without any other rank.

torch's own load sends the plans of all ranks to rank 0 and back, though nothing changes them, and megatron-core's
gathers the descriptions of all tensors of all ranks before it. A checkpoint's index already says what is where.
"""

from __future__ import annotations

import gc
import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_rl.checkpoint.plain_pickle import read_plain, reason
from megatron_rl.checkpoint.shards import METADATA
from megatron_rl.checkpoint.stored_index import shape_in_whole


class StoredShards:
    """Reader of the tensors and objects of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        """Read the index. Raises OSError, and ValueError for one that is damaged or names more than data."""
        self._reader = FileSystemReader(folder)
        with _without_collector():
            metadata = _index_in(folder / METADATA)
        self._reader.set_up_storage_reader(metadata, is_coordinator=False)
        self._described = metadata.state_dict_metadata

    def tensor(self, name: str) -> TensorStorageMetadata:
        """Raises ValueError if there is no tensor of this name."""
        found = self._described.get(name)
        if not isinstance(found, TensorStorageMetadata):
            raise ValueError(f"it has no tensor {name}")
        return found

    def holds(self, name: str) -> bool:
        return name in self._described

    def read(self, items: Sequence[ShardedBase]) -> list[Any]:
        """Fill the tensors in place. Returns the data of each item.

        Raises OSError, and ValueError if the checkpoint lacks an item or has it in another shape.
        """
        planner = _ShardPlanner()
        plan: list[ReadItem] = []
        for item in items:
            if isinstance(item, ShardedTensor):
                item.data = item.data.detach()
                target = item.data.view(shape_in_whole(item))
                reads = self._reads_of_tensor(item, target)
                planner.targets |= {id(read): target for read in reads}
                plan += reads
            else:
                plan.append(self._read_of_object(item))
        self._reader.read_data(LoadPlan(plan), planner).wait()
        return [item.data if isinstance(item, ShardedTensor) else planner.objects[item.unique_key] for item in items]

    def _reads_of_tensor(self, item: ShardedTensor, target: Tensor) -> list[ReadItem]:
        stored = self.tensor(item.key)
        if item.allow_shape_mismatch:
            target.zero_()
        elif stored.size != torch.Size(item.global_shape):
            raise ValueError(f"{item.key} has the shape {[*stored.size]} in it, and {[*item.global_shape]} here")
        chunk = ChunkStorageMetadata(offsets=torch.Size(item.global_offset), sizes=target.shape)
        reads = create_read_items_for_chunk_list(item.key, stored, [chunk])
        if not item.allow_shape_mismatch and sum(math.prod(read.lengths) for read in reads) != target.numel():
            raise ValueError(f"it lacks a part of {item.key} at {[*item.global_offset]}")
        return reads

    def _read_of_object(self, item: ShardedBase) -> ReadItem:
        assert isinstance(item, ShardedObject)
        name = item.unique_key
        if not isinstance(self._described.get(name), BytesStorageMetadata):
            raise ValueError(f"it has no object {name}")
        index, nothing = MetadataIndex(name), torch.Size((0,))
        return ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)


def _index_in(path: Path) -> Metadata:
    with path.open("rb") as file:
        try:
            found = read_plain(file)
        except OSError:
            raise
        except Exception as error:  # a damaged pickle may raise anything
            raise ValueError(f"{path.name} is not an index: {error}") from error
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise ValueError(f"{path.name} is not an index")
    return found


@contextmanager
def _without_collector() -> Iterator[None]:
    """Pause Python's search for garbage, which otherwise takes most of the time in which millions of objects are
    created."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _ShardPlanner(DefaultLoadPlanner):
    """Knows the tensor, or part of one, that each read fills."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: dict[int, Tensor] = {}  # by the identity of the read
        self.objects: dict[str, Any] = {}

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return self.transform_tensor(read_item, self.targets[id(read_item)])

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: the data was read in place."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # A list with one object, because megatron-core writes one.
        try:
            (self.objects[read_item.dest_index.fqn],) = torch.load(value, weights_only=True)
        except UnpicklingError as error:
            raise ValueError(f"{read_item.dest_index.fqn}: {reason(error)}") from error
