"""Attention over packed trees as they are, by FlexAttention (arXiv 2412.05496): nothing that is shared is gathered, and
no pair of tokens is computed twice.

One kernel goes through the blocks of queries and keys that have anything to do with one another. Which these are
follows from the ends of subtrees, and is found on the host, once for all layers. torch compiles it at the first
micro-batch, and twice more at most: for several blocks instead of one, and for another number of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from megatron_rl.platform.attention import PackedSequences

BLOCK = 128
"""Tokens of a block of queries, and of one of keys."""

Attend = Callable[[Tensor, Tensor, Tensor, BlockMask], Tensor]
"""query [1, heads, queries, head_size], key and value [1, kv_heads, tokens, head_size], which blocks of them to look at
-> [1, heads, queries, head_size]."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of queries (rows) and keys (columns), by what the queries see of the keys."""

    partly: NDArray[np.bool_]
    """[blocks, blocks] some of them, or all but for what is behind the last token."""
    wholly: NDArray[np.bool_]
    """[blocks, blocks] each query all of the keys."""

    @classmethod
    def of(cls, subtree_ends: NDArray[np.int32], queries: NDArray[np.int64] | None = None) -> Blocks:
        """
        Args:
            subtree_ends: see `PackedSequences`.
            queries: places of those that attend, ascending; all where None. Where a block has gaps between them, what
                it would see there counts as seen in part.
        """
        tokens = len(subtree_ends)
        if queries is None:
            queries = np.arange(tokens)
        rows, keys = np.arange(0, len(queries), BLOCK), np.arange(0, tokens, BLOCK)
        first_query = queries[rows][:, None]
        last_query = queries[np.minimum(rows + BLOCK, len(queries)) - 1][:, None]
        last_ends = np.maximum.reduceat(subtree_ends, keys)
        first_ends = np.minimum.reduceat(subtree_ends, keys)
        # Of earlier keys a query sees those that end behind it: the first query of a block sees the most.
        seen = (keys <= last_query) & (last_ends > first_query)
        full = (rows + BLOCK <= len(queries))[:, None] & (keys + BLOCK <= tokens)
        wholly = full & (keys + BLOCK - 1 <= first_query) & (first_ends > last_query)
        return cls(seen & ~wholly, wholly)

    @property
    def count(self) -> int:
        """How many are computed."""
        return int(self.partly.sum() + self.wholly.sum())


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """Attention of all trees of a micro-batch at once."""

    kernel: Attend
    mask: BlockMask

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `Layout.attend`."""
        value = value.contiguous()  # see `VarlenLayout.attend`
        query, key, value = (each.transpose(0, 1)[None] for each in (query, key, value))
        attended = self.kernel(query, key, value, self.mask)
        return attended[0].transpose(0, 1).flatten(1)


def compiled_attention(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
    """FlexAttention by the kernel that torch makes of it; not compiled it would hold all scores. In fp32 it multiplies
    in what `torch.set_float32_matmul_precision` says."""
    # Else torch takes another kernel for less than 128 tokens, and compiles for that.
    options = {"FORCE_USE_FLEX_ATTENTION": True}
    attended: Tensor = _compiled()(query, key, value, block_mask=mask, enable_gqa=True, kernel_options=options)
    return attended


@cache
def _compiled() -> Callable[..., Tensor]:
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=True)  # not for one number of tokens
    return compiled


def tree_layout(
    packed: PackedSequences, device: torch.device, kernel: Attend = compiled_attention, part: Tensor | None = None
) -> TreeLayout:
    """Layout of packed sequences, or of a part of them (see `Platform.attention_layout`), all of which are attended to
    in one kernel."""
    blocks = Blocks.of(packed.subtree_ends.numpy(), None if part is None else part.numpy())
    ends = packed.subtree_ends.to(device, non_blocking=True)
    places = torch.arange(len(ends)) if part is None else part
    at = places.to(device, non_blocking=True)

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= at[query]) & (at[query] < ends[key])

    mask = BlockMask.from_kv_blocks(
        *_in_order(blocks.partly),
        *_in_order(blocks.wholly),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(len(places), len(ends)),
    )
    return TreeLayout(kernel, mask.to(device))


def _in_order(blocks: NDArray[np.bool_]) -> tuple[Tensor, Tensor]:
    """[1, 1, rows] how many of each row, and [1, 1, rows, columns] which: these first."""
    counts = torch.from_numpy(blocks.sum(1, dtype=np.int32))
    order = torch.from_numpy(np.argsort(~blocks, axis=1, kind="stable").astype(np.int32))
    return counts[None, None], order[None, None]
