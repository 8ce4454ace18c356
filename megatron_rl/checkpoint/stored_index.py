"""Index of a checkpoint in torch's format, `.metadata`: what is where in which file.

It is a pickle with two objects for each tensor that a rank wrote. At 16,384 ranks, one process would need minutes to
create and pickle them all, so each rank pickles its own and rank 0 only joins bytes. That works because a pickle is a
sequence of instructions for a stack machine, and those that fill a list follow one that puts an empty list there:

    pickle of [a, b]                       PROTOCOL  EMPTY_LIST  MARK a b APPENDS                   STOP
    a rank's part                                                MARK a b APPENDS
    pickle of a list, joined from parts    PROTOCOL  EMPTY_LIST  MARK a b APPENDS  MARK c APPENDS   STOP

An instruction can also refer to an object by a number that an earlier one gave it. The types in _COMMON have the first
numbers, in every part and in the whole. The next ones are free: each part gives them to the names of its own tensors.
"""

from __future__ import annotations

import copyreg
import hashlib
import io
import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
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

_COMMON = (torch.Size, ChunkStorageMetadata, MetadataIndex, _StorageInfo)
"""Types of the objects that there are many of."""
_CALLS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    ChunkStorageMetadata: lambda box: (ChunkStorageMetadata, (box.offsets, box.sizes)),
    MetadataIndex: lambda index: (MetadataIndex, (index.fqn, index.offset)),
    _StorageInfo: lambda place: (_StorageInfo, (place.relative_path, place.offset, place.length)),
}
"""Calls that create them when they are unpickled: a third shorter than with the names of their attributes."""
_PROTOCOL = 2  # later ones divide a pickle into frames
_PRIME = 2**61 - 1


@dataclass(frozen=True)
class StoredItem:
    """A tensor or an object in the file of a rank."""

    item: ShardedBase
    start: int
    length: int  # bytes


class TensorPart(NamedTuple):  # unpickled faster than a dataclass
    """A rank's boxes of a tensor."""

    dtype: torch.dtype
    size: tuple[int, ...]  # of the whole tensor
    elements: int  # `_elements` of the rank's boxes
    boxes: bytes  # instructions that add the boxes to a list


@dataclass(frozen=True)
class IndexPart:
    """Description of a rank's file."""

    tensors: dict[str, TensorPart]
    objects: list[str]
    places: bytes  # instructions that add the places in the rank's file to a dictionary


def shape_in_whole(tensor: ShardedTensor) -> torch.Size:
    """Shape of a shard in the dimensions of the whole tensor, which may stack layers."""
    return torch.Size((1,) * tensor.prepend_axis_num + tuple(tensor.local_shape))


def index_part(file: str, stored: Sequence[StoredItem]) -> IndexPart:
    """Describe what a rank wrote into its file."""
    names: dict[str, str] = {}  # each once: pickle knows objects by their identity
    shards: dict[str, list[tuple[ShardedTensor, ChunkStorageMetadata]]] = defaultdict(list)
    objects: list[str] = []
    places: dict[MetadataIndex, _StorageInfo] = {}
    for one in stored:
        if isinstance(one.item, ShardedTensor):
            name = names.setdefault(one.item.key, one.item.key)
            box = ChunkStorageMetadata(torch.Size(one.item.global_offset), shape_in_whole(one.item))
            shards[name].append((one.item, box))
            index = MetadataIndex(name, box.offsets)
        else:
            assert isinstance(one.item, ShardedObject)
            index = MetadataIndex(one.item.unique_key)
            objects.append(index.fqn)
        places[index] = _StorageInfo(file, one.start, one.length)
    pickler = _Pickler()
    tensors = {}
    for name, found in shards.items():
        first, boxes = found[0][0], [box for _, box in found]
        elements = sum(_elements(box.offsets, box.sizes) for box in boxes) % _PRIME
        tensors[name] = TensorPart(first.dtype, tuple(first.global_shape), elements, pickler.fill(boxes))
    return IndexPart(tensors, objects, pickler.number([*names, file]) + pickler.fill(places))


def joined(parts: Sequence[IndexPart]) -> Iterator[bytes]:
    """Return the pickle of torch's `Metadata`, piece by piece.

    Raises ValueError if the shards of all ranks overlap or have a gap: the sharded state dict was wrong.
    """
    tensors = _tensors(parts)
    described: dict[str, Any] = {}
    for name, found in tensors.items():
        properties = TensorProperties(dtype=found[0].dtype)
        described[name] = TensorStorageMetadata(properties, torch.Size(found[0].size), [])
    described |= {name: BytesStorageMetadata() for name in _objects(parts)}
    pickler = _Pickler()
    yield pickler.start
    # First the places, since each part gives its names numbers that others have given before.
    yield pickler.refer(pickler.places)
    yield from (part.places for part in parts)
    yield pickle.POP
    yield pickler.number([described[name].chunks for name in tensors])
    for name, found in tensors.items():
        yield b"".join([pickler.refer(described[name].chunks), *(part.boxes for part in found), pickle.POP])
    yield pickler.refer(Metadata(described, None, pickler.places)) + pickle.STOP


def _tensors(parts: Sequence[IndexPart]) -> dict[str, list[TensorPart]]:
    """Boxes of all ranks, by tensor. Raises ValueError if they do not cover each tensor exactly once."""
    tensors: dict[str, list[TensorPart]] = defaultdict(list)
    for part in parts:
        for name, tensor in part.tensors.items():
            tensors[name].append(tensor)
    for name, found in tensors.items():
        (size, *others) = {tensor.size for tensor in found}
        if others:
            raise ValueError(f"the tensor {name} has different shapes on the ranks")
        if sum(tensor.elements for tensor in found) % _PRIME != _elements((0,) * len(size), size):
            raise ValueError(f"the shards of the tensor {name} overlap, or do not cover it")
    return tensors


def _objects(parts: Sequence[IndexPart]) -> list[str]:
    """Names of all objects. Raises ValueError if one is saved twice."""
    counts = Counter(name for part in parts for name in part.objects)
    for name, writers in counts.items():
        if writers > 1:
            raise ValueError(f"the object {name} is saved by more than one rank: it needs a different offset on each")
    return list(counts)


# Element (i, j) stands for the number x^i * y^j, where x and y are random and all is modulo a prime. The numbers of a
# box then have a short sum: (x^end - x^start) / (x - 1) on each axis, multiplied. Boxes cover a tensor once exactly if
# their sums add up to that of the whole tensor. With a gap or an overlap, or with both of equal size, the sums are two
# different polynomials of x and y, which are equal at a random place only with a probability of length / 2^61.
def _elements(offset: Sequence[int], shape: Sequence[int]) -> int:
    """Sum of the numbers of a box's elements, times (x - 1) of each axis."""
    product = 1
    for axis, (start, length) in enumerate(zip(offset, shape, strict=True)):
        product *= pow(_number(axis), start + length, _PRIME) - pow(_number(axis), start, _PRIME)
    return product % _PRIME


@cache
def _number(axis: int) -> int:
    return int.from_bytes(hashlib.sha256(str(axis).encode()).digest()) % _PRIME


class _Pickler:
    """Writes instructions to follow others."""

    def __init__(self) -> None:
        self._content = io.BytesIO()
        self._pickler = pickle.Pickler(self._content, _PROTOCOL)
        self._pickler.dispatch_table = {**copyreg.dispatch_table, **_CALLS}
        self.places: dict[MetadataIndex, _StorageInfo] = {}
        """Stands for the dictionary that the parts of all ranks fill."""
        self.start = pickle.PROTO + bytes([_PROTOCOL]) + self.number([*_COMMON, self.places])
        """First instructions of a pickle."""

    def number(self, values: Iterable[Any]) -> bytes:
        """Give values their numbers. From now on, what contains them refers to them."""
        self._pickler.fast = False
        return self._dump(list(values)) + pickle.POP

    def fill(self, values: list[Any] | dict[Any, Any]) -> bytes:
        """Add values to the list or dictionary that lies on the stack."""
        return self.refer(values)[len(pickle.EMPTY_LIST) :]

    def refer(self, value: Any) -> bytes:
        """Put a value on the stack: what is numbered by its number, and the rest without giving numbers."""
        self._pickler.fast = True
        return self._dump(value)

    def _dump(self, value: Any) -> bytes:
        self._content.seek(0)
        self._content.truncate()
        self._pickler.dump(value)
        return self._content.getvalue()[len(pickle.PROTO) + 1 : -len(pickle.STOP)]
