"""Token sequences to micro-batches of packed tokens: no padding, and what neighbours begin with stands once.

packed         p p p p  x a  b b   answers x a . and x b b . to the prompt p; the last trained token predicts nothing
subtree_ends   8 8 8 8  8 6  8 8   of the tree that they make
select               ^  ^ ^        whose logits predict the trained tokens of the first answer
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress

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
    starts = [0]
    for mask in loss_masks:
        starts.append(starts[-1] + sum(mask))
    packed: list[MicroBatch] = []
    filling = _Filling()
    for index in chosen:
        mask = loss_masks[index]
        if not any(mask):
            continue
        first, last = mask.index(True), len(mask) - 1
        if not mask[last]:
            last -= mask[::-1].index(True)
        sequence = tokens[index]
        one = _Sequence(sequence[:first], sequence[first:last], mask[first : last + 1], sequence[first : last + 1])
        if filling.trees and filling.size + filling.cost(one) > limit:
            packed.append(filling.close())
            filling = _Filling()
        filling.add(one, starts[index])
    if filling.trees:
        packed.append(filling.close())
    return packed


@dataclass(frozen=True, slots=True)
class _Sequence:
    """A sequence up to its last trained token, which predicts nothing."""

    beginning: list[int]
    """Up to the first trained token."""
    rest: list[int]
    """From there up to the last."""
    mask: list[bool]
    """Of the first trained token to the last."""
    targets: list[int]
    """Those that the mask takes are trained."""


class _Filling:
    """A micro-batch being filled."""

    def __init__(self) -> None:
        self.trees: list[tuple[list[int], list[_Sequence]]] = []
        """Sequences with the same beginning."""
        self.trained: list[int] = []
        self.size = 0

    def cost(self, one: _Sequence) -> int:
        """Packed tokens the sequence would add, were nothing shared but the beginning."""
        shared = bool(self.trees) and self.trees[-1][0] == one.beginning
        return len(one.rest) + (0 if shared else len(one.beginning))

    def add(self, one: _Sequence, start: int) -> None:
        """start: place of the sequence's first trained token among all of the batch's."""
        self.size += self.cost(one)
        if not self.trees or self.trees[-1][0] != one.beginning:
            self.trees.append((one.beginning, []))
        self.trees[-1][1].append(one)
        self.trained.extend(range(start, start + sum(one.mask)))

    def close(self) -> MicroBatch:
        tokens: list[int] = []
        positions: list[int] = []
        ends: list[int] = []
        edges = [0]
        select: list[int] = []
        targets: list[int] = []
        for beginning, members in self.trees:
            paths = _merge(beginning, [one.rest for one in members], tokens, positions, ends)
            edges.append(len(tokens))
            for path, one in zip(paths, members, strict=True):
                select.extend(compress(path[len(beginning) - 1 :], one.mask))
                targets.extend(compress(one.targets, one.mask))
        return MicroBatch(
            cu_seqlens=torch.tensor(edges, dtype=torch.int32),
            subtree_ends=torch.tensor(ends, dtype=torch.int32),
            tokens=torch.tensor(tokens),
            positions=torch.tensor(positions),
            select=torch.tensor(select),
            targets=torch.tensor(targets),
            trained=torch.tensor(self.trained),
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
