"""Which of a micro-batch's packed tokens each context-parallel rank works on. Pure.

Each tree is cut into twice as many chunks as there are ranks, and a rank has one from the front and the one as far from
the end: of a long sequence early tokens, which attend to few, and late ones, which attend to many (zig-zag, as in
arXiv 2407.21783, section 3.3.2):

    rank    0 0 1 1 2 2 2 1 1 1 0 0

Tree by tree, not the micro-batch as one: only within a tree do later tokens attend to more. A tree may be cut anywhere,
for every token keeps its place, and who sees whom is a matter of places. Of all trees together each rank has equally
many tokens, so all need as much memory and send as much.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megatron_rl.algorithms.packing import MicroBatch, places_of
from megatron_rl.platform.attention import PackedSequences


@dataclass(frozen=True, slots=True)
class ContextPart:
    """What one rank works on of a micro-batch. Every trained token is predicted in one part."""

    tokens: Tensor
    """[part]"""
    positions: Tensor
    """[part] within their sequence."""
    select: Tensor
    """[selected] the token of the part whose logits predict each trained token."""
    targets: Tensor
    """[selected] the trained tokens."""
    trained: Tensor
    """[selected] see `MicroBatch.trained`."""
    places: Tensor
    """[part] where the tokens stand in the whole, ascending."""
    places_of_ranks: Tensor
    """[ranks, part] where those of each rank do."""
    whole: PackedSequences
    """That of all ranks, with trees added so that they have equally many tokens."""


def context_part(batch: MicroBatch, rank: int, ranks: int) -> ContextPart:
    """The part of one of so many ranks."""
    whole = _divisible(batch, ranks)
    places_of_ranks = cut(whole.cu_seqlens, ranks)
    places = places_of_ranks[rank]
    predicted = torch.isin(whole.select, places)
    return ContextPart(
        tokens=whole.tokens[places],
        positions=whole.positions[places],
        select=torch.searchsorted(places, whole.select[predicted]),
        targets=whole.targets[predicted],
        trained=whole.trained[predicted],
        places=places,
        places_of_ranks=places_of_ranks,
        whole=whole,
    )


def cut(cu_seqlens: Tensor, ranks: int) -> Tensor:
    """Packed tokens of each rank, ascending.

    cu_seqlens: [trees + 1] where each tree begins, and the end, which the ranks divide. -> [ranks, part]
    """
    edges = cu_seqlens.numpy().astype(np.int64)
    # As if all tokens were dealt out one by one: so ranks differ by one token in a tree, and by none in all of them.
    dealt = (edges[:, None] + np.arange(ranks)[::-1]) // ranks
    of_rank = np.diff(dealt, axis=0)  # [trees, ranks]
    front = of_rank // 2
    sizes = np.concatenate((front, (of_rank - front)[:, ::-1]), axis=1)  # of the chunks of each tree, in their order
    chunks = np.stack((edges[:-1, None] + sizes.cumsum(axis=1) - sizes, sizes), axis=-1)
    places = [places_of(chunks[:, [rank, 2 * ranks - 1 - rank]].reshape(-1, 2)) for rank in range(ranks)]
    return torch.from_numpy(np.stack(places))


def _divisible(batch: MicroBatch, ranks: int) -> MicroBatch:
    """With the fewest tokens more that make the ranks divide all: trees of their own, which predict nothing."""
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
