"""Parts of tensors that each rank sends to each other one, when trainer and engine have different layouts. Pure.

A rank holds boxes of the model's tensors, as megatron-core's sharded state describes them for checkpoints. In every
layout, the boxes of all ranks together cover the same tensors.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Self

import torch

from megatron_rl.model.lora_mapping import adapted_weight, is_adapter
from megatron_rl.model.sharded_names import EMBEDDING, expert_of, layer_of, weight_name


@dataclass(frozen=True, slots=True)
class Box:
    key: str
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
        starts = (mine - theirs for mine, theirs in zip(self.offset, outer.offset, strict=True))
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))

    def to_json(self) -> list[Any]:
        return [self.key, str(self.dtype).removeprefix("torch."), self.offset, self.shape]

    @classmethod
    def from_json(cls, content: list[Any]) -> Self:
        key, dtype, offset, shape = content
        found = getattr(torch, dtype)
        assert isinstance(found, torch.dtype), dtype
        return cls(str(key), found, tuple(offset), tuple(shape))


@dataclass(frozen=True, slots=True)
class ModelStage:
    """Weights of a pipeline stage of receivers without a layout."""

    first: int
    """First layer of it."""
    end: int
    """The layer after its last one."""
    embedding: bool
    """Whether it has the embedding: the first stage, and the last one if that shares it."""
    output: bool
    """Whether it has the last norm and the output layer."""

    def has(self, weight: str) -> bool:
        """Whether it has a weight, by its name as in `weight_name`."""
        layer = layer_of(weight)
        if layer is not None:
            return self.first <= layer < self.end
        return self.embedding if weight.startswith(EMBEDDING) else self.output


@dataclass(frozen=True, slots=True)
class ModelShare:
    """One of `of` shares of the model, or of one stage of it, for a receiver without a layout; see `shares_of`."""

    index: int
    of: int
    stage: ModelStage | None = None
    """None: the whole model."""
    own_experts: bool = False
    """Whether each receiver computes other experts than the rest, as many of them, in the order of their numbers."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        stage = content["stage"]
        return cls(**content | {"stage": None if stage is None else ModelStage(**stage)})


@dataclass(frozen=True, slots=True)
class Move:
    source: int
    target: int
    box: Box
    held: Box
    needed: Box


def plan_moves(held: Sequence[Iterable[Box]], needed: Sequence[Iterable[Box]]) -> list[Move]:
    """Moves that give every rank each element that it needs exactly once.

    A rank that holds what it needs copies it. Among ranks that hold the same box, such as data-parallel copies, the one
    that has sent least so far sends it; on a tie the nearest, which is likely on the same node.

    Args:
        held: boxes of each rank. Boxes of one tensor are equal or disjoint.
        needed: boxes of each rank.

    Raises:
        ValueError: no rank holds a needed element, held boxes overlap, or dtypes differ.
    """
    holders = Holders(held)
    sent = [0] * max(len(held), len(needed))
    shared_with: dict[Box, list[tuple[Box, Box, list[int], frozenset[int]]]] = {}  # equal replicas need equal boxes
    moves = []
    for target, boxes in enumerate(needed):
        for box in boxes:
            if (parts := shared_with.get(box)) is None:
                parts = shared_with[box] = holders.parts_of(box, target)
            for shared, source_box, ranks, any_of in parts:
                source = target
                if target not in any_of:
                    source = _least(ranks, sent, target)
                    sent[source] += shared.bytes
                moves.append(Move(source, target, shared, source_box, box))
    return moves


def _least(ranks: Sequence[int], sent: Sequence[int], target: int) -> int:
    """Rank that has sent least; on a tie the nearest to the target."""
    least = min([sent[rank] for rank in ranks])
    return min([rank for rank in ranks if sent[rank] == least], key=lambda rank: (abs(rank - target), rank))


def lasting(moves: Iterable[Move]) -> tuple[list[Move], list[Move]]:
    """Split moves into those of weights that stay as they are and those of weights that training changes. Where there
    are adapters, they alone are trained; otherwise everything is."""
    of_base: list[Move] = []
    of_adapters: list[Move] = []
    for move in moves:
        (of_adapters if is_adapter(move.box.key) else of_base).append(move)
    return (of_base, of_adapters) if of_adapters else ([], of_base)


def shares_of(
    held: Iterable[Iterable[Box]], count: int, stage: ModelStage | None = None, own_experts: bool = False
) -> list[list[Box]]:
    """Boxes of each of `count` shares of the whole model, or of a stage, which together are all distinct boxes of it.

    The largest weight goes to the emptiest share, and so on; equal weights go in the order of their names. All boxes
    of one weight, as `weight_name` defines it, and of its adapter are in one share, so that the process that gets the
    share can join them. With `own_experts` each share has the experts of its receiver: with 8 experts and 4 shares,
    share 1 has experts 2 and 3 of each layer.

    held: boxes of each rank. Boxes of one tensor are equal or disjoint.
    """
    weights: dict[str, dict[Box, None]] = defaultdict(dict)  # a set that keeps its order
    for boxes in held:
        for box in boxes:
            name = adapted_weight(weight_name(box.key, box.offset))
            if stage is None or stage.has(name):
                weights[name][box] = None
    sizes = {name: sum(box.bytes for box in boxes) for name, boxes in weights.items()}
    shares: list[list[Box]] = [[] for _ in range(count)]
    filled = [0] * count
    experts = 1 + max((expert for name in weights if (expert := expert_of(name)) is not None), default=0)
    for name in sorted(weights, key=lambda name: (-sizes[name], name)):
        expert = expert_of(name) if own_experts else None
        index = min(range(count), key=filled.__getitem__) if expert is None else expert * count // experts
        shares[index] += sorted(weights[name], key=lambda box: (box.key, box.offset))
        filled[index] += sizes[name]
    return shares


class Holders:
    """Index of the ranks that hold each distinct box."""

    def __init__(self, held: Sequence[Iterable[Box]]) -> None:
        ranks_of: dict[str, dict[Box, list[int]]] = defaultdict(dict)
        for rank, boxes in enumerate(held):
            for box in boxes:
                ranks_of[box.key].setdefault(box, []).append(rank)
        # Sorted by offset, so that bisection finds candidates: the first axis of most tensors is the layer, e.g. 64 of
        # them.
        self._boxes = {key: sorted(found.items(), key=lambda item: item[0].offset) for key, found in ranks_of.items()}
        self._starts = {key: [box.offset[0] for box, _ in found] for key, found in self._boxes.items()}
        self._longest = {key: max(box.shape[0] for box, _ in found) for key, found in self._boxes.items()}

    def parts_of(self, box: Box, target: int) -> list[tuple[Box, Box, list[int], frozenset[int]]]:
        """Each part of a box that ranks hold: (part, the held box that contains it, its ranks, the same as a set).

        target: a rank that needs the box, for the error. Raises ValueError if the parts are not the whole box.
        """
        parts = [
            (shared, source_box, ranks, frozenset(ranks))
            for source_box, ranks in self.candidates(box)
            if (shared := intersection(box, source_box)) is not None
        ]
        if (found := sum(shared.elements for shared, *_ in parts)) != box.elements:
            raise ValueError(
                f"{box.key} {[*box.shape]} at {[*box.offset]}, which rank {target} needs to generate: the training "
                f"ranks hold {found} of its {box.elements} elements"
            )
        return parts

    def candidates(self, box: Box) -> list[tuple[Box, list[int]]]:
        if box.key not in self._boxes:
            return []
        starts = self._starts[box.key]
        first = bisect_right(starts, box.offset[0] - self._longest[box.key])
        return self._boxes[box.key][first : bisect_left(starts, box.offset[0] + box.shape[0])]


def intersection(one: Box, other: Box) -> Box | None:
    """Overlap of two boxes of one tensor, or None. Raises ValueError if their dtypes differ, since a refit does not
    convert."""
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
    """Moves between different ranks, split into rounds in which no rank sends or receives more than `limit` bytes, or
    one element. A round is sent at once, so `limit` bounds the buffers.

    First fit: each move goes into the first round with room at both ends, which gives few more rounds than the busiest
    rank needs.
    """
    rounds: list[list[Move]] = []
    sending: dict[int, Occupancy] = defaultdict(lambda: Occupancy(limit))
    receiving: dict[int, Occupancy] = defaultdict(lambda: Occupancy(limit))
    pieces = cache(lambda box: [(part, part.bytes) for part in cut(box, limit // box.dtype.itemsize)])
    for move in moves:
        if move.source == move.target:
            continue
        sends, receives = sending[move.source], receiving[move.target]
        for box, size in pieces(move.box):
            level = sends.level(size)
            taken = sends.taken[level] | receives.taken[level]
            place = (~taken & (taken + 1)).bit_length() - 1  # lowest bit that is 0, e.g. 0b0111 -> 3
            if place == len(rounds):
                rounds.append([])
            rounds[place].append(Move(move.source, move.target, box, move.held, move.needed))
            sends.add(place, size)
            receives.add(place, size)
    return rounds


class Occupancy:
    """Room of one end in each round, as bits, so that one operation finds the first round with room."""

    LEVELS = 12
    """Levels of room: the limit, half of it, a quarter and so on."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._room: dict[int, int] = {}
        self._lost: dict[int, int] = {}  # number of levels that a round has less room than
        self.taken = [0] * self.LEVELS
        """Each level's bits of the rounds that have less room than that."""

    def level(self, size: int) -> int:
        """Smallest level whose room holds `size` bytes."""
        return min(self.LEVELS, max(1, (self._limit // size).bit_length())) - 1

    def add(self, place: int, size: int) -> None:
        room = self._room[place] = self._room.get(place, self._limit) - size
        lost = self._lost.get(place, 0)
        while lost < self.LEVELS and self._limit >> lost > room:
            self.taken[lost] |= 1 << place
            lost += 1
        self._lost[place] = lost


def cut(box: Box, limit: int) -> Iterator[Box]:
    """Split a box along its first axes into parts of at most `limit` elements, or of one."""
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
