"""Token sequences to micro-batches of packed tokens: no padding, and what neighbours begin with stands once.

packed         p p p p  x a  b b   answers x a . and x b b . to the prompt p; the last trained token predicts nothing
subtree_ends   8 8 8 8  8 6  8 8   of the tree that they make
select               ^  ^ ^        whose logits predict the trained tokens of the first answer
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, compress

import torch
from torch import Tensor

from megatron_rl.platform.attention import PackedSequences


@dataclass(frozen=True, slots=True)
class MicroBatch(PackedSequences):
    """One forward and backward on a rank."""

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

    def to(self, device: torch.device) -> MicroBatch:
        """The same with what the model reads on `device`."""
        names = ("tokens", "positions", "select", "targets", "trained")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def pack(
    tokens: Sequence[list[int]], loss_masks: Sequence[list[bool]], chosen: Iterable[int], limit: int
) -> list[MicroBatch]:
    """Pack the chosen sequences, in their order, into micro-batches of at most `limit` packed tokens, on the CPU.

    A sequence that alone has more makes its own; one without a trained token is left out. Neighbours that begin alike
    up to their first trained token share it within a micro-batch, and the beginnings of what follows too, which the
    limit counts as if they did not.

    Args:
        tokens: all sequences of the batch, [seq] each.
        loss_masks: [seq] for each, which of its tokens are trained on; never the first.
    """
    starts = [0, *accumulate(map(sum, loss_masks))]
    packed: list[MicroBatch] = []
    filling = _Filling()
    for index in chosen:
        sequence, mask, trained = tokens[index], loss_masks[index], range(starts[index], starts[index + 1])
        if not trained:
            continue
        first, last = mask.index(True), len(mask) - 1
        if not mask[last]:
            last -= mask[::-1].index(True)
        beginning = sequence[:first]
        alike = filling.beginning == beginning
        if filling.size and filling.size + (last - first if alike else last) > limit:
            packed.append(filling.close())
            filling, alike = _Filling(), False
        if not alike:
            filling.begin(beginning)
        filling.add(sequence[first:last], sequence[first : last + 1], mask[first : last + 1], trained)
    if filling.size:
        packed.append(filling.close())
    return packed


class _Filling:
    """A micro-batch being filled: tree after tree of sequences with the same beginning, all tokens up to the first
    trained one."""

    def __init__(self) -> None:
        self.size = 0
        """Packed tokens, were nothing shared but the beginnings."""
        self.beginning: list[int] | None = None
        """Of the tree that is being filled."""
        self._rests: list[list[int]] = []
        self._masks: list[list[bool]] = []
        self._tokens: list[int] = []
        self._positions: list[int] = []
        self._ends: list[int] = []
        self._edges = [0]
        self._select: list[int] = []
        self._targets: list[int] = []
        self._trained: list[int] = []

    def begin(self, beginning: list[int]) -> None:
        """Go on with another tree."""
        self._end()
        self.beginning = beginning
        self.size += len(beginning)

    def add(self, rest: list[int], targets: list[int], mask: list[bool], trained: range) -> None:
        """Add a sequence to the tree.

        Args:
            rest: its tokens behind the beginning, without the last trained one, which predicts nothing.
            targets: its tokens from the first trained one to the last.
            mask: which of these are trained on.
            trained: places of these among all trained tokens of the batch.
        """
        self.size += len(rest)
        self._rests.append(rest)
        self._masks.append(mask)
        self._targets.extend(compress(targets, mask))
        self._trained.extend(trained)

    def _end(self) -> None:
        """Pack the tree."""
        if self.beginning is None:
            return
        paths = _merge(self.beginning, self._rests, self._tokens, self._positions, self._ends)
        self._edges.append(len(self._tokens))
        last_of_beginning = len(self.beginning) - 1
        for path, mask in zip(paths, self._masks, strict=True):
            self._select.extend(compress(path[last_of_beginning:], mask))
        self._rests, self._masks = [], []

    def close(self) -> MicroBatch:
        self._end()
        return MicroBatch(
            cu_seqlens=torch.tensor(self._edges, dtype=torch.int32),
            subtree_ends=torch.tensor(self._ends, dtype=torch.int32),
            tokens=torch.tensor(self._tokens),
            positions=torch.tensor(self._positions),
            select=torch.tensor(self._select),
            targets=torch.tensor(self._targets),
            trained=torch.tensor(self._trained),
        )


def _merge(
    beginning: list[int], rests: list[list[int]], tokens: list[int], positions: list[int], ends: list[int]
) -> list[list[int]]:
    """Append sequences with one beginning to the packed tokens, positions and subtree ends, depth first, everything
    they share once.

    Returns:
        The places of the beginning followed by each rest.
    """
    shared_by_all = len(beginning)
    path = list(range(len(tokens), len(tokens) + shared_by_all))
    tokens.extend(beginning)
    positions.extend(range(shared_by_all))
    ends.extend(beginning)  # to be replaced, when what continues them is known
    paths = [path] * len(rests)
    previous: list[int] = []
    # In this order a sequence shares most with the one before it, and follows those it continues.
    for index in sorted(range(len(rests)), key=rests.__getitem__):
        rest = rests[index]
        shared = _common_beginning(previous, rest)
        if shared < len(rest):
            for place in path[shared_by_all + shared :]:
                ends[place] = len(tokens)
            path = [*path[: shared_by_all + shared], *range(len(tokens), len(tokens) + len(rest) - shared)]
            tokens.extend(rest[shared:])
            positions.extend(range(shared_by_all + shared, len(path)))
            ends.extend(rest[shared:])
            previous = rest
        paths[index] = path
    for place in path:
        ends[place] = len(tokens)
    return paths


def _common_beginning(one: list[int], other: list[int]) -> int:
    """How many tokens both start with."""
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)
