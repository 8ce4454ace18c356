"""Split of a micro-batch's packed tokens over context-parallel ranks. Pure.

Each tree is cut into two chunks per rank. A rank gets one chunk from the front and its mirror image
from the end, that is, early tokens, which attend to few, and late tokens, which attend to many (zig-zag, as in arXiv
2407.21783, section 3.3.2):

    rank    0 0 1 1 2 2 2 1 1 1 0 0

The cut is per tree, not per micro-batch, because only within a tree do later tokens attend to more. A tree may be cut
anywhere, because every token keeps its position, which determines what it attends to. Over all trees each rank has the
same number of tokens, and so needs the same memory and sends the same amount.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megatron_rl.algorithms.packing import MicroBatch, run_indices
from megatron_rl.model.platform.attention import PackedSequences


@dataclass(frozen=True, slots=True)
class ContextPart:
    """One rank's part of a micro-batch. Every trained token is predicted in exactly one part."""

    tokens: Tensor  # [part]
    positions: Tensor  # [part] position within the sequence
    select: Tensor  # [selected] index in the part of the token whose logits predict each trained token
    targets: Tensor  # [selected] the trained tokens
    trained: Tensor  # [selected] see `MicroBatch.trained`.
    indices: Tensor
    indices_of_ranks: Tensor  # [ranks, part] indices of each rank's tokens in the whole
    whole: PackedSequences
    """The whole micro-batch, padded with trees so that all ranks have the same number of tokens."""


def context_part(batch: MicroBatch, rank: int, ranks: int) -> ContextPart:
    whole = _divisible(batch, ranks)
    indices_of_ranks = cut(whole.cu_seqlens, ranks)
    indices = indices_of_ranks[rank]
    predicted = torch.isin(whole.select, indices)
    return ContextPart(
        tokens=whole.tokens[indices],
        positions=whole.positions[indices],
        select=torch.searchsorted(indices, whole.select[predicted]),
        targets=whole.targets[predicted],
        trained=whole.trained[predicted],
        indices=indices,
        indices_of_ranks=indices_of_ranks,
        whole=whole,
    )


def cut(cu_seqlens: Tensor, ranks: int) -> Tensor:
    """Return the packed tokens of each rank, ascending, [ranks, part].

    cu_seqlens: [trees + 1] start of each tree, and the end, which the number of ranks divides.
    """
    edges = cu_seqlens.numpy().astype(np.int64)
    # As if tokens were dealt one by one: ranks differ by at most one token in a tree, and not at all over all trees.
    dealt = (edges[:, None] + np.arange(ranks)[::-1]) // ranks
    of_rank = np.diff(dealt, axis=0)  # [trees, ranks]
    front = of_rank // 2
    sizes = np.concatenate((front, (of_rank - front)[:, ::-1]), axis=1)  # of the chunks of each tree in order
    chunks = np.stack((edges[:-1, None] + sizes.cumsum(axis=1) - sizes, sizes), axis=-1)
    indices = [run_indices(chunks[:, [rank, 2 * ranks - 1 - rank]].reshape(-1, 2)) for rank in range(ranks)]
    return torch.from_numpy(np.stack(indices))


def _divisible(batch: MicroBatch, ranks: int) -> MicroBatch:
    missing = -len(batch.tokens) % ranks
    if not missing:
        return batch
    zeros = torch.zeros(missing, dtype=batch.tokens.dtype)
    ends = torch.arange(1, missing + 1, dtype=torch.int32) + len(batch.tokens)
    return replace(
        batch,
        cu_seqlens=torch.cat((batch.cu_seqlens, ends)),
        subtree_ends=torch.cat((batch.subtree_ends, ends)),
        tokens=torch.cat((batch.tokens, zeros)),
        positions=torch.cat((batch.positions, zeros)),
    )
