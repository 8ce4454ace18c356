"""The index that ranks write together is the one that torch would write alone, and shards cover each tensor once."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from itertools import pairwise, product

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_rl.checkpoint.stored_index import StoredItem, index_part, joined


def shard(
    name: str, size: Sequence[int], offset: Sequence[int], shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> ShardedTensor:
    return ShardedTensor(
        name, torch.empty(tuple(shape), dtype=dtype), dtype, tuple(shape), tuple(size), tuple(offset), None
    )


def index_of(ranks: Sequence[Sequence[ShardedBase]]) -> Metadata:
    """Index of a checkpoint in which each item has ten bytes."""
    parts = []
    for rank, items in enumerate(ranks):
        parts.append(index_part(f"file {rank}", [StoredItem(item, 10 * at, 10) for at, item in enumerate(items)]))
    found: Metadata = pickle.loads(b"".join(joined(parts)))
    return found


def plain_index_of(ranks: Sequence[Sequence[ShardedBase]]) -> Metadata:
    index = Metadata({}, None, {})
    for rank, items in enumerate(ranks):
        for at, item in enumerate(items):
            place = _StorageInfo(f"file {rank}", 10 * at, 10)
            if isinstance(item, ShardedObject):
                index.state_dict_metadata[item.unique_key] = BytesStorageMetadata()
                index.storage_data[MetadataIndex(item.unique_key)] = place
                continue
            assert isinstance(item, ShardedTensor)
            offset = torch.Size(item.global_offset)
            whole = TensorStorageMetadata(TensorProperties(dtype=item.dtype), torch.Size(item.global_shape), [])
            tensor = index.state_dict_metadata.setdefault(item.key, whole)
            assert isinstance(tensor, TensorStorageMetadata)
            shape = (1,) * item.prepend_axis_num + tuple(item.local_shape)
            tensor.chunks.append(ChunkStorageMetadata(offset, torch.Size(shape)))
            index.storage_data[MetadataIndex(item.key, offset)] = place
    return index


@st.composite
def ranks_with_shards(draw: st.DrawFn) -> list[list[ShardedBase]]:
    """Tensors that are cut into grids, and an object for each rank, dealt out to some ranks."""
    ranks: list[list[ShardedBase]] = [[] for _ in range(draw(st.integers(1, 5)))]
    for number in range(draw(st.integers(0, 3))):
        size = draw(st.lists(st.integers(1, 6), max_size=3))
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
        cuts = [sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=2))}) for length in size]
        for corner in product(*(list(pairwise(of_axis)) for of_axis in cuts)):
            offset, shape = [start for start, _ in corner], [end - start for start, end in corner]
            draw(st.sampled_from(ranks)).append(shard(f"tensor {number}", size, offset, shape, dtype))
    for rank, items in enumerate(ranks):
        if draw(st.booleans()):
            items.insert(0, ShardedObject("rng", None, (len(ranks),), (rank,)))
    return ranks


@examples(40)
@given(ranks_with_shards())
def test_the_joined_index_is_that_of_one_process(ranks: list[list[ShardedBase]]) -> None:
    assert index_of(ranks) == plain_index_of(ranks)


def test_layers_of_one_tensor_have_a_dimension_more() -> None:
    layers = [
        ShardedTensor("w", torch.empty(3), torch.float32, (3,), (2, 3), (layer, 0), None, prepend_axis_num=1)
        for layer in range(2)
    ]
    assert index_of([layers[:1], layers[1:]]) == plain_index_of([layers[:1], layers[1:]])


def test_many_items_of_a_rank_are_all_there() -> None:
    """pickle fills a list by a thousand at a time."""
    ranks = [[shard("w", (4000,), (at,), (1,)) for at in range(first, 4000, 2)] for first in range(2)]
    assert index_of(ranks) == plain_index_of(ranks)


@examples(40)
@given(ranks_with_shards(), st.data())
def test_a_gap_or_an_overlap_is_refused(ranks: list[list[ShardedBase]], data: st.DataObject) -> None:
    of_tensors = [(items, item) for items in ranks for item in items if isinstance(item, ShardedTensor)]
    if not of_tensors:
        return
    items, item = data.draw(st.sampled_from(of_tensors))
    change = data.draw(st.sampled_from(["missing", "twice", "moved", "larger"]))
    if change == "missing":
        alone = all(other is item or other.key != item.key for _, other in of_tensors)
        items[:] = [other for other in items if other is not item]
        if alone:
            return  # then the tensor is not in the checkpoint at all
    elif change == "twice" or not item.global_shape:
        data.draw(st.sampled_from(ranks)).append(item)
    elif change == "moved":
        item.global_offset = (item.global_offset[0] + 1, *item.global_offset[1:])
    else:
        item.local_shape = (*item.local_shape[:-1], item.local_shape[-1] + 1)
    with pytest.raises(ValueError, match="overlap, or do not cover it"):
        index_of(ranks)


def test_a_gap_that_has_the_size_of_an_overlap_is_refused() -> None:
    with pytest.raises(ValueError, match="shards of the tensor w overlap, or do not cover it"):
        index_of([[shard("w", (4, 4), (0, 0), (2, 4))], [shard("w", (4, 4), (1, 0), (2, 4))]])


def test_a_tensor_with_different_shapes_is_refused() -> None:
    with pytest.raises(ValueError, match="the tensor w has different shapes on the ranks"):
        index_of([[shard("w", (4,), (0,), (2,))], [shard("w", (5,), (2,), (2,))]])
