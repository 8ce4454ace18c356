"""Reading the tensors and objects that one rank needs from a checkpoint in torch_dist format, without any other rank.

torch's own load sends the plans of all ranks to rank 0 and back, though nothing changes them, and megatron-core's
gathers the descriptions of all tensors of all ranks before it. A checkpoint's index already says what is where.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
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


def read_shards(folder: Path, items: Sequence[ShardedBase]) -> list[Any]:
    """Fill the tensors in place. Returns the data of each item.

    Raises OSError, and ValueError if the checkpoint lacks an item or has it in another shape.
    """
    reader = FileSystemReader(folder)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    planner = _ShardPlanner()
    plan = [read for item in items for read in planner.reads_of(item, metadata)]
    reader.read_data(LoadPlan(plan), planner).wait()
    return [item.data if isinstance(item, ShardedTensor) else planner.objects[item.unique_key] for item in items]


class _ShardPlanner(DefaultLoadPlanner):
    """Knows the tensor, or part of one, that each read fills."""

    def __init__(self) -> None:
        super().__init__()
        self._targets: dict[int, Tensor] = {}  # by the identity of the read
        self.objects: dict[str, Any] = {}

    def reads_of(self, item: ShardedBase, metadata: Metadata) -> list[ReadItem]:
        if isinstance(item, ShardedObject):
            return self._reads_of_object(item.unique_key, metadata)
        assert isinstance(item, ShardedTensor)
        stored = metadata.state_dict_metadata.get(item.key)
        if not isinstance(stored, TensorStorageMetadata):
            raise ValueError(f"it has no tensor {item.key}")
        item.data = item.data.detach()
        if item.allow_shape_mismatch:
            item.data.zero_()
        elif stored.size != torch.Size(item.global_shape):
            raise ValueError(f"{item.key} has the shape {[*stored.size]} in it, and {[*item.global_shape]} here")
        target = item.data[(None,) * item.prepend_axis_num]
        chunk = ChunkStorageMetadata(offsets=torch.Size(item.global_offset), sizes=target.shape)
        reads = create_read_items_for_chunk_list(item.key, stored, [chunk])
        if not item.allow_shape_mismatch and sum(math.prod(read.lengths) for read in reads) != target.numel():
            raise ValueError(f"it lacks a part of {item.key} at {[*item.global_offset]}")
        self._targets |= {id(read): target for read in reads}
        return reads

    def _reads_of_object(self, name: str, metadata: Metadata) -> list[ReadItem]:
        if not isinstance(metadata.state_dict_metadata.get(name), BytesStorageMetadata):
            raise ValueError(f"it has no object {name}")
        index, nothing = MetadataIndex(name), torch.Size((0,))
        return [ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)]

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return self.transform_tensor(read_item, self._targets[id(read_item)])

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: the data was read in place."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # Pickled by ranks of this run, as a list with one object, because megatron-core does so.
        (self.objects[read_item.dest_index.fqn],) = torch.load(value, weights_only=False)
