"""Packed tokens as a prediction layer reads them. Pure.

At a token, the layer reads the model's output behind the token before it, and predicts the token after it:

    packed     a b c d e      the prompt a b with the answers c d . and e .
    ahead        b c d e      with the outputs behind
                 a b c b
    predicts     c d . .      and e, which also follows b

So the packed trees stay as they are, shared beginnings included, except for their first tokens, which have none
before them. Each position is that of the token before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_rl.algorithms.packing import MicroBatch


@dataclass(frozen=True, slots=True)
class AheadBatch:
    batch: MicroBatch
    """All packed tokens but the first of each tree. `select` and `targets` are those of the micro-batch, except the
    targets that a first token predicts."""
    before: Tensor
    """[packed] index in the micro-batch of the token before each."""


def ahead_of(batch: MicroBatch) -> AheadBatch:
    starts = batch.cu_seqlens[:-1].long()
    is_first = torch.zeros(len(batch.tokens), dtype=torch.bool)
    is_first[starts] = True
    kept = (~is_first).nonzero()[:, 0]
    if not len(kept):
        return AheadBatch(MicroBatch.empty(), torch.zeros(1, dtype=torch.long))
    firsts = is_first.cumsum(0).int()  # [packed] first tokens up to each
    predicts = ~is_first[batch.select]
    select = batch.select[predicts]
    before = _tokens_before(starts.numpy(), batch.subtree_ends.numpy(), batch.positions.numpy())
    ahead = replace(
        batch,
        cu_seqlens=(batch.cu_seqlens - torch.arange(len(batch.cu_seqlens), dtype=torch.int32)).unique_consecutive(),
        subtree_ends=(batch.subtree_ends - firsts)[kept],
        tokens=batch.tokens[kept],
        positions=batch.positions[kept] - 1,
        select=select - firsts[select],
        targets=batch.targets[predicts],
        trained=batch.trained[predicts],
        choices=None,
    )
    return AheadBatch(ahead, torch.from_numpy(before)[kept])


def _tokens_before(
    starts: NDArray[np.int64], subtree_ends: NDArray[np.int32], positions: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Index of the token before each packed one, [packed]; -1 for those at `starts`."""
    count = len(subtree_ends)
    # A token follows its neighbour, unless that one ends a branch. It then follows the last token, in packed order, of
    # the position before its own. Example: a b c d e with the positions 0 1 2 3 2: e follows b, not d.
    behind = np.flatnonzero(subtree_ends[:-1] <= np.arange(1, count)) + 1
    runs = np.union1d(starts, behind)
    before = np.arange(-1, count - 1)
    last = np.full(positions.max() + 1, -1)  # [positions] index of the last token with each
    for first, stop in zip(runs, [*runs[1:], count], strict=True):
        at = positions[first]
        before[first] = last[at - 1] if at else -1
        last[at : at + stop - first] = np.arange(first, stop)
    return before
