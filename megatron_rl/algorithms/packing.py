"""Packing of token sequences into micro-batches without padding, with shared prefixes stored once.

packed         p p p p  x a  b b   answers x a . and x b b . to the prompt p; the last trained token predicts nothing
subtree_ends   8 8 8 8  8 6  8 8   of the tree that they form select               ^  ^ ^        tokens whose logits
predict the trained tokens of the first answer
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_rl.algorithms.bins import ROWS_ARE_FREE, BinLimit, Tree, spread
from megatron_rl.algorithms.packed_choices import ChoiceTable, PackedChoices
from megatron_rl.model.choice_form import ChoiceForm
from megatron_rl.model.choices import Choices
from megatron_rl.model.platform.attention import PackedSequences

HEAD = 64
"""Tokens after the prefix that are compared first, before whole sequences."""


@dataclass(frozen=True, slots=True)
class MicroBatch(PackedSequences):
    """One forward and backward pass of a replica. All tensors are on the CPU."""

    tokens: Tensor  # [packed]
    positions: Tensor
    select: Tensor  # [selected] index of the packed token whose logits predict each trained token
    targets: Tensor  # [selected] the trained tokens
    trained: Tensor
    """[selected] index of each trained token among those of the whole batch, all its sequences concatenated."""
    choices: PackedChoices | None = None
    """The engine's choices of experts; None unless they are replayed, and for an empty micro-batch."""

    @classmethod
    def empty(cls) -> MicroBatch:
        """Return one token that predicts nothing, for a rank with fewer micro-batches than others."""
        zero, none = torch.zeros(1, dtype=torch.long), torch.zeros(0, dtype=torch.long)
        edges = torch.tensor([0, 1], dtype=torch.int32)
        return cls(edges, edges[1:], tokens=zero, positions=zero, select=none, targets=none, trained=none)


def pack(
    tokens: Sequence[list[int]], loss_masks: Sequence[list[bool]], chosen: Iterable[int], limit: int
) -> list[MicroBatch]:
    """Pack the chosen sequences into micro-batches of at most `limit` packed tokens, ignoring gathered rows: see
    `Packing`."""
    packing = Packing(tokens, loss_masks, chosen)
    return [packing.microbatch(names) for names in packing.bins(BinLimit(limit, ROWS_ARE_FREE))]


class Packing:
    """The sequences of a batch that go through the model; those without a trained token are skipped.

    Neighbours that begin with the same tokens, those before the first trained token of the first neighbour, form a
    tree: within a micro-batch they share these tokens, and common prefixes of the rest. Answers to one prompt are such
    neighbours, and so are a rollout's branches, which may train on nothing until far behind the prompt. Shared prefixes
    are determined once; micro-batches are then assembled from runs of tokens of any length.
    """

    def __init__(
        self,
        tokens: Sequence[list[int]],
        loss_masks: Sequence[list[bool]],
        chosen: Iterable[int],
        choices: tuple[ChoiceForm, Sequence[Choices]] | None = None,
    ) -> None:
        """
        Args:
            tokens: all sequences of the batch, [seq] each.
            loss_masks: [seq] for each, which of its tokens are trained on; never the first.
            chosen: which of them go through the model.
            choices: the engine's choices of experts for the tokens of each sequence, if they are replayed.
        """
        masks = [bytes(mask) for mask in loss_masks]
        trained = [mask.count(1) for mask in masks]
        self._trained_before = [0, *accumulate(trained)]  # before each sequence of the batch, and in all
        self._packed = packed = [index for index in chosen if trained[index]]
        # Of each packed sequence:
        self._lists = [tokens[index] for index in packed]
        self._flags = [masks[index] for index in packed]
        self._starts = [0, *accumulate(map(len, self._lists))]
        self._choices: ChoiceTable | None = None
        if choices is not None:
            form, of_sequences = choices
            self._choices = ChoiceTable.of(form, [of_sequences[index] for index in packed], [*map(len, self._lists)])
        self._firsts = [mask.find(1) for mask in self._flags]
        self._lasts = [mask.rfind(1) for mask in self._flags]
        self._tree_of: list[int] = []
        self.trees: list[Tree] = []
        """Trees of all packed sequences; the name of a sequence is its index among the packed ones."""
        named = 0
        while named < len(packed):
            prefix = self._lists[named][: self._firsts[named]]
            names = range(named, next(self._others(named + 1, prefix), len(packed)))
            self._firsts[named : names.stop] = [len(prefix)] * len(names)
            rests = [(self._lists[name], len(prefix), self._lasts[name]) for name in names]
            self._tree_of += [len(self.trees)] * len(names)
            self.trees.append(_tree(len(prefix), names, rests))
            named = names.stop

    def _others(self, start: int, prefix: list[int]) -> Iterator[int]:
        """Yield the names from `start` on of sequences that do not begin with this prefix, or train on some of it."""
        for name in range(start, len(self._lists)):
            if self._firsts[name] < len(prefix) or self._lists[name][: len(prefix)] != prefix:
                yield name

    @cached_property
    def _tokens(self) -> NDArray[np.int64]:
        return np.fromiter(chain.from_iterable(self._lists), np.int64, sum(map(len, self._lists)))

    @cached_property
    def _masks(self) -> NDArray[np.bool_]:
        return np.frombuffer(b"".join(self._flags), np.bool_)

    @cached_property
    def _spans(self) -> NDArray[np.int64]:
        """[packed, 2] start and length, in `_tokens`, of each sequence's span behind the prefix of its tree, up to its
        last trained token."""
        firsts = np.array(self._firsts)
        return np.stack((np.array(self._starts[:-1]) + firsts, np.array(self._lasts) + 1 - firsts), 1)

    @cached_property
    def _trained(self) -> NDArray[np.int64]:
        """[packed, 2] start and length of each sequence's trained tokens among those of the whole batch."""
        before = np.array(self._trained_before)
        return np.stack((before[:-1], np.diff(before)), 1)[self._packed]

    def bins(self, limit: BinLimit, count: int = 1) -> list[list[int]]:
        """Return the names of the sequences of each micro-batch, ascending.

        Args:
            limit: memory limit of a micro-batch; a sequence that exceeds it alone gets its own.
            count: number of micro-batches that run anyway: if fewer would do, the sequences are spread over this many.
        """
        return spread(self.trees, limit, count)

    def microbatch(self, names: Sequence[int]) -> MicroBatch:
        merged = _Merged()
        in_bin = set(names)
        for number in dict.fromkeys(self._tree_of[name] for name in names):
            self._merge(self.trees[number], in_bin, merged)
        ends = np.array(sorted(merged.ends))
        spans = run_indices(self._spans[names])
        trained = self._masks[spans]
        sources = run_indices(merged.sources)
        # Indices of the tokens that predict those of the spans.
        select = run_indices([run for name in names for run in merged.paths[name]])
        return MicroBatch(
            cu_seqlens=torch.tensor(merged.edges, dtype=torch.int32),
            subtree_ends=torch.from_numpy(np.repeat(ends[:, 2], ends[:, 1])).int(),
            tokens=torch.from_numpy(self._tokens[sources]),
            positions=torch.from_numpy(run_indices(merged.positions)),
            select=torch.from_numpy(select[trained]),
            targets=torch.from_numpy(self._tokens[spans[trained]]),
            trained=torch.from_numpy(run_indices(self._trained[names])),
            choices=None if self._choices is None else self._choices.packed(sources, self._paths(names, merged)),
        )

    def _paths(self, names: Sequence[int], merged: _Merged) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Indices of each sequence's tokens among the packed ones, and among those of the whole batch."""
        for name in names:
            (last_of_prefix, _), *rest = merged.paths[name]
            prefix = self._firsts[name]
            packed = run_indices([(last_of_prefix + 1 - prefix, prefix), *rest])
            yield packed, self._starts[name] + np.arange(len(packed))

    def _merge(self, tree: Tree, in_bin: set[int], merged: _Merged) -> None:
        """Append the tree of its sequences that are in the bin, depth first, with shared tokens once."""
        # Example: the prefix p p with the rests x a and x b c is packed as p p x a b c. The second rest shares x, so
        # the first path is left behind x, which ends the subtree of a at 4; the second path is x at 2, then b c from
        # 4. At the end the subtrees of x, b, c and the prefix end at 6. A token is seen by the tokens after it up to
        # the end of its subtree: b and c see p, p and x, but not a.
        members = [place for place, name in enumerate(tree.names) if name in in_bin]
        start, prefix = merged.edges[-1], tree.prefix
        end = start + prefix
        merged.add(self._starts[tree.names[members[0]]], 0, prefix)
        last_of_prefix: Run = (end - 1, 1)
        path: list[Run] = []
        predicting = [last_of_prefix]
        before = members[0]
        for place in members:
            rest = tree.rests[place]
            # In lexicographic order, a sequence shares its longest prefix with its predecessor.
            shared = tree.shared[place] if place == before + 1 else min(tree.shared[before + 1 : place + 1], default=0)
            before = place
            if shared < rest:
                path = merged.leave(path, shared, end)
                path.append((end, rest - shared))
                predicting = [last_of_prefix, *path]
                name = tree.names[place]
                merged.add(self._starts[name] + self._firsts[name] + shared, prefix + shared, rest - shared)
                end += rest - shared
            merged.paths[tree.names[place]] = predicting
        merged.leave(path, 0, end)
        merged.ends.append((start, prefix, end))
        merged.edges.append(end)


Run = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Merged:
    """Concatenated trees, as runs of packed tokens."""

    edges: list[int] = field(default_factory=lambda: [0])
    """First token of each tree, and the end of the last one."""
    sources: list[Run] = field(default_factory=list)
    positions: list[Run] = field(default_factory=list)
    ends: list[tuple[int, int, int]] = field(default_factory=list)
    """(start, length, subtree end) of runs of packed tokens."""
    paths: dict[int, list[Run]] = field(default_factory=dict)
    """Packed tokens of each sequence, by name, from the last one of its prefix."""

    def add(self, source: int, position: int, length: int) -> None:
        self.sources.append((source, length))
        self.positions.append((position, length))

    def leave(self, path: list[Run], shared: int, end: int) -> list[Run]:
        """Return the first `shared` tokens of a path; the subtrees of the others end at `end`."""
        kept: list[Run] = []
        for place, length in path:
            stays = min(length, shared)
            shared -= stays
            if stays:
                kept.append((place, stays))
            if stays < length:
                self.ends.append((place + stays, length - stays, end))
        return kept


def run_indices(runs: Sequence[Run] | NDArray[np.int64]) -> NDArray[np.int64]:
    numbers = runs if isinstance(runs, np.ndarray) else np.fromiter(chain.from_iterable(runs), np.int64, 2 * len(runs))
    starts, lengths = numbers.reshape(-1, 2).T
    before = lengths.cumsum() - lengths
    return np.repeat(starts - before, lengths) + np.arange(lengths.sum())


_Rest = tuple[list[int], int, int]
"""Sequence, first, last: its tokens first..last-1."""


def _tree(prefix: int, names: range, rests: Sequence[_Rest]) -> Tree:
    heads = [sequence[first : min(last, first + HEAD)] for sequence, first, last in rests]
    full = [tuple(head) for head in heads if len(head) == HEAD]
    if len({*full}) < len(full):
        heads = [sequence[first:last] for sequence, first, last in rests]
    order = sorted(range(len(rests)), key=heads.__getitem__)
    shared = [0, *(_common_prefix(heads[one], heads[other]) for one, other in pairwise(order))]
    lengths = [last - first for _, first, last in rests]
    return Tree(prefix, [names[index] for index in order], [lengths[index] for index in order], shared)


def _common_prefix(one: list[int], other: list[int]) -> int:
    if one == other:  # common for short answers
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
