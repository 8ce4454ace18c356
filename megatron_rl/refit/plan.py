"""Which rank sends which part of which tensor to whom, when trainer and engine cut the model differently. Pure.

A rank's part of the model is boxes of its tensors, as megatron-core's sharded state describes them for a checkpoint:
whatever the layout, the boxes of all ranks together are the same tensors.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Box:
    """A part of one of the model's tensors."""

    key: str
    """Of the whole tensor."""
    dtype: torch.dtype
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Its place in a box that it is part of."""
        starts = (mine - theirs for mine, theirs in zip(self.offset, outer.offset, strict=True))
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Move:
    """What one rank sends to another one, or copies for itself."""

    source: int
    target: int
    box: Box
    held: Box
    """Of the source, in which it lies ..."""
    needed: Box
    """... and of the target, to which it goes."""


def plan_moves(held: Sequence[Iterable[Box]], needed: Sequence[Iterable[Box]]) -> list[Move]:
    """The moves after which every rank has what it needs, each element of it once.

    A rank that holds what it needs takes its own. Of ranks that hold the same, such as data-parallel copies, the one
    sends it that has sent the least so far; of several the nearest, which is likeliest on the same node.

    Args:
        held: boxes of each rank. Those of one tensor are equal or disjoint.
        needed: boxes of each rank.

    Raises:
        ValueError: something that is needed is nowhere, in boxes that overlap, or of another dtype.
    """
    holders = Holders(held)
    sent: Counter[int] = Counter()
    moves = []
    for target, boxes in enumerate(needed):
        for box in boxes:
            found = 0
            for source_box, ranks in holders.candidates(box):
                shared = intersection(box, source_box)
                if shared is None:
                    continue
                found += shared.elements
                source = target
                if target not in ranks:
                    source = min(ranks, key=lambda rank: (sent[rank], abs(rank - target), rank))
                    sent[source] += shared.bytes
                moves.append(Move(source, target, shared, source_box, box))
            if found != box.elements:
                raise ValueError(
                    f"{box.key} {[*box.shape]} at {[*box.offset]}, by which rank {target} generates: the ranks that "
                    f"train hold {found} of its {box.elements} elements"
                )
    return moves


class Holders:
    """Which ranks hold a box, for every distinct one of a tensor."""

    def __init__(self, held: Sequence[Iterable[Box]]) -> None:
        ranks_of: dict[str, dict[Box, list[int]]] = defaultdict(dict)
        for rank, boxes in enumerate(held):
            for box in boxes:
                ranks_of[box.key].setdefault(box, []).append(rank)
        # By where they begin along the first axis, which of a layer's tensors is the layer: there are many layers.
        self._boxes = {key: sorted(found.items(), key=lambda item: item[0].offset) for key, found in ranks_of.items()}
        self._starts = {key: [box.offset[0] for box, _ in found] for key, found in self._boxes.items()}
        self._longest = {key: max(box.shape[0] for box, _ in found) for key, found in self._boxes.items()}

    def candidates(self, box: Box) -> list[tuple[Box, list[int]]]:
        """Boxes that may have something in common with `box`, and the ranks that hold them."""
        if box.key not in self._boxes:
            return []
        starts = self._starts[box.key]
        first = bisect_right(starts, box.offset[0] - self._longest[box.key])
        return self._boxes[box.key][first : bisect_left(starts, box.offset[0] + box.shape[0])]


def intersection(one: Box, other: Box) -> Box | None:
    """What two boxes of one tensor have in common; None where that is nothing. Raises ValueError where they are of
    different dtypes: a refit converts nothing."""
    if one.dtype != other.dtype:
        raise ValueError(f"{one.key} is {other.dtype} in training and {one.dtype} in generation")
    starts = tuple(map(max, one.offset, other.offset))
    ends = (
        min(start + size, other_start + other_size)
        for start, size, other_start, other_size in zip(one.offset, one.shape, other.offset, other.shape, strict=True)
    )
    shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return Box(one.key, one.dtype, starts, shape) if min(shape) > 0 else None


def rounds_of(moves: Iterable[Move], limit: int) -> list[list[Move]]:
    """The moves between different ranks, cut and put into rounds in which no rank sends or receives more than `limit`
    bytes, at least those of one element. What belongs to a round is sent at once, so this bounds the buffers.

    Each goes into the first round in which both ends have room for it: nearly as few as the busiest rank needs.
    """
    rounds: list[list[Move]] = []
    ends: dict[tuple[str, int], Occupancy] = defaultdict(lambda: Occupancy(limit))
    for move in moves:
        if move.source == move.target:
            continue
        sends, receives = ends["sends", move.source], ends["receives", move.target]
        for box in cut(move.box, limit // move.box.dtype.itemsize):
            level = sends.level(box.bytes)
            taken = sends.taken[level] | receives.taken[level]
            place = (~taken & (taken + 1)).bit_length() - 1
            if place == len(rounds):
                rounds.append([])
            rounds[place].append(replace(move, box=box))
            sends.add(place, box.bytes)
            receives.add(place, box.bytes)
    return rounds


class Occupancy:
    """How full the rounds are for one end, to be asked at once about all of them: a bit each."""

    LEVELS = 12
    """Of room: the limit, half of it, a quarter and so on."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._busy: Counter[int] = Counter()
        self.taken = [0] * self.LEVELS
        """By level: bits of the rounds that have less room than that."""

    def level(self, size: int) -> int:
        """The least room that is enough for so many bytes."""
        return min(self.LEVELS, max(1, (self._limit // size).bit_length())) - 1

    def add(self, place: int, size: int) -> None:
        self._busy[place] += size
        for level in range(self.LEVELS):
            if self._busy[place] + (self._limit >> level) > self._limit:
                self.taken[level] |= 1 << place


def cut(box: Box, limit: int) -> Iterator[Box]:
    """The box in parts of at most `limit` elements, at least one, along its first axes."""
    if box.elements <= limit:
        yield box
        return
    axis = next(axis for axis, size in enumerate(box.shape) if size > 1)
    step = max(1, limit * box.shape[axis] // box.elements)
    for start in range(0, box.shape[axis], step):
        offset, shape = [*box.offset], [*box.shape]
        offset[axis] += start
        shape[axis] = min(step, shape[axis] - start)
        yield from cut(Box(box.key, box.dtype, tuple(offset), tuple(shape)), limit)
