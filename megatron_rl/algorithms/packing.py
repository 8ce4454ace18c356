"""Token sequences to micro-batches of packed tokens: no padding, and what neighbours begin with stands once.

packed         p p p p  x a  b b   answers x a . and x b b . to the prompt p; the last trained token predicts nothing
subtree_ends   8 8 8 8  8 6  8 8   of the tree that they make
select               ^  ^ ^        whose logits predict the trained tokens of the first answer
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, groupby, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_rl.algorithms.bins import ROWS_ARE_FREE, Room, Tree, spread
from megatron_rl.platform.attention import PackedSequences

HEAD = 64
"""Tokens behind their beginning by which sequences are told apart, before all of them are compared."""


@dataclass(frozen=True, slots=True)
class MicroBatch(PackedSequences):
    """One forward and backward of a replica. All of it lies on the CPU."""

    tokens: Tensor
    """[packed]"""
    positions: Tensor
    """[packed] within their sequence."""
    select: Tensor
    """[selected] the packed token whose logits predict each trained token."""
    targets: Tensor
    """[selected] the trained tokens."""
    trained: Tensor
    """[selected] which of the batch's trained tokens these are: those of all its sequences, concatenated."""

    @classmethod
    def empty(cls) -> MicroBatch:
        """One token that predicts nothing, for a rank that has less to do than others."""
        zero, none = torch.zeros(1, dtype=torch.long), torch.zeros(0, dtype=torch.long)
        edges = torch.tensor([0, 1], dtype=torch.int32)
        return cls(edges, edges[1:], tokens=zero, positions=zero, select=none, targets=none, trained=none)


def pack(
    tokens: Sequence[list[int]], loss_masks: Sequence[list[bool]], chosen: Iterable[int], limit: int
) -> list[MicroBatch]:
    """The chosen sequences in micro-batches of at most `limit` packed tokens, whatever is gathered of them again: see
    `Packing`."""
    packing = Packing(tokens, loss_masks, chosen)
    return [packing.microbatch(names) for names in packing.bins(Room(limit, ROWS_ARE_FREE))]


class Packing:
    """Sequences that go through the model together; those without a trained token are left out.

    Neighbours that begin alike up to their first trained token are a tree: within a micro-batch they share that, and
    the beginnings of what follows too. What shares what is found once; micro-batches are then made of runs of tokens,
    however long.
    """

    def __init__(self, tokens: Sequence[list[int]], loss_masks: Sequence[list[bool]], chosen: Iterable[int]) -> None:
        """
        Args:
            tokens: all sequences of the batch, [seq] each.
            loss_masks: [seq] for each, which of its tokens are trained on; never the first.
            chosen: which of them go through the model.
        """
        masks = [bytes(mask) for mask in loss_masks]
        self._trained_before = [0, *accumulate(mask.count(1) for mask in masks)]  # each sequence of the batch, and all
        self._packed = packed = [index for index in chosen if any(masks[index])]
        # Of each that is packed:
        self._lists = [tokens[index] for index in packed]
        self._flags = [masks[index] for index in packed]
        self._starts = [0, *accumulate(map(len, self._lists))]
        self._firsts = [mask.find(1) for mask in self._flags]
        self._lasts = [mask.rfind(1) for mask in self._flags]
        self._tree_of: list[int] = []
        self.trees: list[Tree] = []
        """Lengths of all; a sequence's name is its place among those that are packed."""
        beginnings = [sequence[:first] for sequence, first in zip(self._lists, self._firsts, strict=True)]
        named = 0
        for beginning, alike in groupby(beginnings):
            names = range(named, named + sum(1 for _ in alike))
            rests = [(self._lists[name], self._firsts[name], self._lasts[name]) for name in names]
            self._tree_of += [len(self.trees)] * len(names)
            self.trees.append(_tree(len(beginning), names, rests))
            named = names.stop

    @cached_property
    def _tokens(self) -> NDArray[np.int64]:
        """Of all that are packed, one sequence after the other."""
        return np.fromiter(chain.from_iterable(self._lists), np.int64, sum(map(len, self._lists)))

    @cached_property
    def _masks(self) -> NDArray[np.bool_]:
        return np.frombuffer(b"".join(self._flags), np.bool_)

    @cached_property
    def _spans(self) -> NDArray[np.int64]:
        """[packed, 2] of `_tokens` those from the first trained one of each to the last: where, and how many."""
        firsts = np.array(self._firsts)
        return np.stack((np.array(self._starts[:-1]) + firsts, np.array(self._lasts) + 1 - firsts), 1)

    @cached_property
    def _trained(self) -> NDArray[np.int64]:
        """[packed, 2] of the trained tokens of the whole batch those of each: where, and how many."""
        before = np.array(self._trained_before)
        return np.stack((before[:-1], np.diff(before)), 1)[self._packed]

    def bins(self, room: Room, count: int = 1) -> list[list[int]]:
        """Names of the sequences of each micro-batch, ascending.

        Args:
            room: of a micro-batch; a sequence that alone needs more makes its own.
            count: micro-batches that are run anyway: where fewer would do, the sequences are spread over as many.
        """
        return spread(self.trees, room, count)

    def microbatch(self, names: Sequence[int]) -> MicroBatch:
        """The sequences of these names, ascending, on the CPU."""
        merged = _Merged()
        in_bin = set(names)
        for number in dict.fromkeys(self._tree_of[name] for name in names):
            self._merge(self.trees[number], in_bin, merged)
        ends = np.array(sorted(merged.ends))
        spans = places_of(self._spans[names])
        trained = self._masks[spans]
        # The places that predict those of the spans.
        select = places_of([run for name in names for run in merged.paths[name]])
        return MicroBatch(
            cu_seqlens=torch.tensor(merged.edges, dtype=torch.int32),
            subtree_ends=torch.from_numpy(np.repeat(ends[:, 2], ends[:, 1])).int(),
            tokens=torch.from_numpy(self._tokens[places_of(merged.sources)]),
            positions=torch.from_numpy(places_of(merged.positions)),
            select=torch.from_numpy(select[trained]),
            targets=torch.from_numpy(self._tokens[spans[trained]]),
            trained=torch.from_numpy(places_of(self._trained[names])),
        )

    def _merge(self, tree: Tree, in_bin: set[int], merged: _Merged) -> None:
        """Append the tree of those of its sequences that are in the bin, depth first, everything they share once."""
        members = [place for place, name in enumerate(tree.names) if name in in_bin]
        start, beginning = merged.edges[-1], tree.beginning
        end = start + beginning
        merged.add(self._starts[tree.names[members[0]]], 0, beginning)
        last_of_beginning: Run = (end - 1, 1)
        path: list[Run] = []
        predicting = [last_of_beginning]
        before = members[0]
        for place in members:
            rest = tree.rests[place]
            # A sequence shares most with the one before it, and follows those it continues.
            shared = tree.shared[place] if place == before + 1 else min(tree.shared[before + 1 : place + 1], default=0)
            before = place
            if shared < rest:
                path = merged.leave(path, shared, end)
                path.append((end, rest - shared))
                predicting = [last_of_beginning, *path]
                name = tree.names[place]
                merged.add(self._starts[name] + self._firsts[name] + shared, beginning + shared, rest - shared)
                end += rest - shared
            merged.paths[tree.names[place]] = predicting
        merged.leave(path, 0, end)
        merged.ends.append((start, beginning, end))
        merged.edges.append(end)


Run = tuple[int, int]
"""First of a number of consecutive places, and that number."""


@dataclass(frozen=True, slots=True)
class _Merged:
    """Trees one after the other, in runs of packed tokens."""

    edges: list[int] = field(default_factory=lambda: [0])
    """Where each tree begins, and the end."""
    sources: list[Run] = field(default_factory=list)
    """Where the packed tokens stand among those of the sequences."""
    positions: list[Run] = field(default_factory=list)
    ends: list[tuple[int, int, int]] = field(default_factory=list)
    """Runs of packed tokens with one subtree end, and that."""
    paths: dict[int, list[Run]] = field(default_factory=dict)
    """By a sequence's name, the packed tokens that it has from the last of its beginning on."""

    def add(self, source: int, position: int, length: int) -> None:
        self.sources.append((source, length))
        self.positions.append((position, length))

    def leave(self, path: list[Run], shared: int, end: int) -> list[Run]:
        """The first `shared` tokens of a path; those behind them are continued by nothing from `end` on."""
        prefix: list[Run] = []
        for place, length in path:
            stays = min(length, shared)
            shared -= stays
            if stays:
                prefix.append((place, stays))
            if stays < length:
                self.ends.append((place + stays, length - stays, end))
        return prefix


def places_of(runs: Sequence[Run] | NDArray[np.int64]) -> NDArray[np.int64]:
    """All places of some runs, one after the other."""
    numbers = runs if isinstance(runs, np.ndarray) else np.fromiter(chain.from_iterable(runs), np.int64, 2 * len(runs))
    starts, lengths = numbers.reshape(-1, 2).T
    before = lengths.cumsum() - lengths
    return np.repeat(starts - before, lengths) + np.arange(lengths.sum())


_Rest = tuple[list[int], int, int]
"""The tokens first..last-1 of a sequence."""


def _tree(beginning: int, names: range, rests: Sequence[_Rest]) -> Tree:
    heads = [sequence[first : min(last, first + HEAD)] for sequence, first, last in rests]
    full = [tuple(head) for head in heads if len(head) == HEAD]
    if len({*full}) < len(full):
        heads = [sequence[first:last] for sequence, first, last in rests]
    order = sorted(range(len(rests)), key=heads.__getitem__)
    shared = [0, *(_common_beginning(heads[one], heads[other]) for one, other in pairwise(order))]
    lengths = [last - first for _, first, last in rests]
    return Tree(beginning, [names[index] for index in order], [lengths[index] for index in order], shared)


def _common_beginning(one: list[int], other: list[int]) -> int:
    """How many tokens both start with."""
    if one == other:  # as short answers often are
        return len(one)
    found, end, width = 0, min(len(one), len(other)), 8
    while found < end:
        stop = min(found + width, end)
        if one[found:stop] == other[found:stop]:
            found, width = stop, 2 * width
        elif stop == found + 1:
            return found
        else:
            width = (stop - found) // 2
    return end
