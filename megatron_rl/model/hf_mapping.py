"""Pure: the Hugging Face tensors in each tensor of megatron-core, and their positions in it.

    linear_qkv [(heads + 2 groups) head, hidden]    for each query group: its queries, its key, its value; each gated
                                                    query is followed by its gate
    in_proj, conv1d                                 for each key head of a delta net: see delta_net.py
    linear_fc1 [2 ffn, hidden]                      gate, then up; the same on every tensor-parallel rank
    word_embeddings, output_layer [padded, hidden]  the vocabulary, then rows without a token
    all others                                      unchanged

The names that differ between architectures are in recipe/architectures/.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from torch import Tensor


@dataclass(frozen=True, slots=True)
class HfTensor:
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A matrix or vector that is one of Hugging Face's tensors, or rows of it.

    Examples: expert 3 of a tensor [experts, inputs, outputs] is `number` 3, `transposed`. Gate projections, which
    alternate with up projections, are one row of each of `blocks`.
    """

    tensor: HfTensor
    number: int | None = None  # place along the tensor's first axis; None: the tensor is one matrix or vector
    transposed: bool = False
    blocks: int = 1  # equal blocks that the rows of the matrix consist of
    rows: range | None = None  # rows of each block that belong to it; None: all

    @property
    def _matrix(self) -> tuple[int, ...]:
        """Shape of the matrix that contains it."""
        shape = self.tensor.shape if self.number is None else self.tensor.shape[1:]
        return shape[::-1] if self.transposed else shape

    @property
    def shape(self) -> tuple[int, ...]:
        rows, *columns = self._matrix
        return (rows if self.rows is None else self.blocks * len(self.rows), *columns)

    @property
    def is_whole(self) -> bool:
        """Whether it is a whole tensor, as it is."""
        return self.number is None and not self.transposed and self.rows is None

    def box(self, axis: int, part: range) -> tuple[slice, ...]:
        """Index of the smallest box of the tensor that contains `part` of the rows (axis 0) or columns (axis 1). Rows
        are those of whole blocks, if there are several."""
        if axis == 0 and self.rows is not None:
            size, taken = self._matrix[0] // self.blocks, len(self.rows)
            first, last = part.start // taken, -(-part.stop // taken)
            if self.blocks == 1:
                part = range(self.rows.start + part.start, self.rows.start + part.stop)
            else:
                part = range(first * size, last * size)
        index = [slice(None)] * axis + [slice(part.start, part.stop)]
        if self.transposed:
            index = [*([] if axis else [slice(None)]), slice(part.start, part.stop)]
        return (*([] if self.number is None else [slice(self.number, self.number + 1)]), *index)

    def taken(self, box: Tensor) -> Tensor:
        """View of the source's elements in a box of its tensor."""
        if self.number is not None:
            box = box[0]
        if self.transposed:
            box = box.transpose(0, 1)
        if self.rows is None or self.blocks == 1:
            return box
        return box.unflatten(0, (-1, self._matrix[0] // self.blocks))[:, self.rows.start : self.rows.stop]


@dataclass(frozen=True, slots=True)
class Weight:
    sources: tuple[Source, ...]  # one after another along the first axis
    split: int | None = None  # axis of each source that tensor-parallel ranks split; None if each has all
    blocks: int | None = None
    """Number of blocks, each with equal parts of all sources, that replace the simple order. Ranks split the rows of
    all blocks."""
    padded: bool = False  # whether rows of zeros may follow

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole weight, without padding."""
        return (sum(source.shape[0] for source in self.sources), *self.sources[0].shape[1:])


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """The part of one source within one tensor of megatron-core."""

    of: Source
    index: tuple[slice, ...]  # box of Hugging Face's tensor that contains the piece
    view: Tensor  # view of the piece in megatron-core's tensor: [blocks, rows, ...].

    @property
    def source(self) -> HfTensor:
        return self.of.tensor

    def within(self, whole: Tensor) -> Tensor:
        """View of the piece in the whole of Hugging Face's tensor, with the elements in the order of `view`."""
        return self.of.taken(whole[self.index])


def sources(found: Mapping[str, Weight]) -> dict[str, HfTensor]:
    return {source.tensor.name: source.tensor for weight in found.values() for source in weight.sources}


def bundles(found: Mapping[str, Weight]) -> list[list[str]]:
    """Group the names of weights so that each of Hugging Face's tensors comes from one group: alone, or all that have
    parts of the same tensor, such as the experts of a layer that are stacked. The order is that of their first ones."""
    group_of: dict[str, list[str]] = {}  # by tensor
    for name, weight in found.items():
        tensors = {source.tensor.name for source in weight.sources}
        met = {id(group): group for tensor in tensors if (group := group_of.get(tensor)) is not None}
        if len(met) == 1:
            (group,) = met.values()
            group.append(name)
        else:
            group = [*chain.from_iterable(met.values()), name]
            tensors |= {tensor for tensor, other in group_of.items() if id(other) in met}
        group_of |= dict.fromkeys(tensors, group)
    return list({id(group): group for group in group_of.values()}.values())


def pieces(weight: Weight, tensor: Tensor, rank: int = 0, size: int = 1) -> Iterator[TensorPiece]:
    """Locate the sources of `weight` in the tensor that tensor-parallel rank `rank` of `size` has of it."""
    if weight.split is None:
        rank, size = 0, 1
    if weight.padded:
        (source,) = weight.sources
        first = min(rank * len(tensor), source.shape[0])
        last = min(first + len(tensor), source.shape[0])
        yield TensorPiece(source, source.box(0, range(first, last)), tensor[None, : last - first])
        return
    if weight.blocks is not None and weight.blocks % size:
        yield from _part_of_a_block(weight, weight.blocks, tensor, rank)
        return
    # Example: linear_qkv of 8 query heads in 4 groups, each head of size 2, on rank 1 of 2. The tensor has 16 rows in 2
    # blocks (groups 2 and 3), each with 4 rows of q, 2 of k and 2 of v. The rank's share of q_proj is rows 8..15, which
    # are consecutive there but not here, so the view is [2 blocks, 4 rows, hidden] and copies in the order of blocks.
    blocks = 1 if weight.blocks is None else weight.blocks // size
    axis = weight.split or 0
    shares = [source.shape[axis] // size for source in weight.sources]
    rows = [source.shape[0] // (size if weight.split == 0 else 1) // blocks for source in weight.sources]
    views = tensor.view(blocks, sum(rows), *tensor.shape[1:]).split(rows, dim=1)
    for source, share, view in zip(weight.sources, shares, views, strict=True):
        yield TensorPiece(source, source.box(axis, range(rank * share, (rank + 1) * share)), view)


def _part_of_a_block(weight: Weight, blocks: int, tensor: Tensor, rank: int) -> Iterator[TensorPiece]:
    """Locate them if there are more ranks than key/value heads: each rank has some rows of one block."""
    rows = [source.shape[0] // blocks for source in weight.sources]
    block, first = divmod(rank * len(tensor), sum(rows))
    begin = 0
    for source, length in zip(weight.sources, rows, strict=True):
        low, high = max(first, begin), min(first + len(tensor), begin + length)
        if low < high:
            start = block * length + low - begin
            yield TensorPiece(
                source, source.box(0, range(start, start + high - low)), tensor[None, low - first : high - first]
            )
        begin += length


def matrices_of(weight: Weight, tensor: Tensor) -> list[Tensor]:
    """Split a whole weight, without padding, into its sources."""
    return [piece.view.reshape(piece.of.shape) for piece in pieces(weight, tensor)]


class Assembly:
    """Hugging Face's tensors, put together from the sources of weights in any order."""

    def __init__(self, found: Mapping[str, Weight]) -> None:
        """found: weights that the tensors consist of, by any names."""
        self._missing = Counter(source.tensor.name for weight in found.values() for source in weight.sources)
        self._begun: dict[str, Tensor] = {}

    def add(self, source: Source, matrix: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensor with its name once its last source is here. matrix: [source.shape]."""
        name = source.tensor.name
        if source.is_whole:
            yield name, matrix
            return
        if name not in self._begun:
            self._begun[name] = matrix.new_empty(source.tensor.shape)
        place = source.taken(self._begun[name][source.box(0, range(source.shape[0]))])
        place.copy_(matrix.reshape(place.shape))
        self._missing[name] -= 1
        if not self._missing[name]:
            yield name, self._begun.pop(name)
