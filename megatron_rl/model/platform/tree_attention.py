"""Attention over packed trees in place, by FlexAttention (arXiv 2412.05496): shared tokens are not gathered, and no
pair of tokens is computed twice.

One kernel visits the blocks of queries and keys that see one another. The host finds these blocks from the ends of
subtrees, once for all layers. torch compiles the kernel at the first micro-batch, and again for what differs in more
than the numbers of tokens and blocks: the dtype, with and without gradients, in inference mode, and for a part of the
tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from megatron_rl.model.platform.attention import PLAIN, AttentionForm, PackedSequences, depths

BLOCK = 128
FEWEST_TOKENS = BLOCK + 1
"""Queries and keys of the kernel at least, with padding: torch would compile other kernels for one token, for one block
and for less than 128 queries."""
MOST_KERNELS = 64
"""Kernels of a process. Beyond its own limit of 8, torch would attend uncompiled and store all scores."""
FP32_BLOCKS = {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 16, "fwd_num_stages": 1}
"""Options of the forward kernel in fp32. With torch's own, from heads of 64 on, ptxas gives a thread of an H100 only 32
registers, and keeps the rest, up to 11 KB, in memory."""

Attend = Callable[..., Any]
"""`flex_attention` by its own parameters: query [1, heads, queries, head_size], key [1, kv_heads, tokens, head_size],
value [1, kv_heads, tokens, value_size], block_mask, scale, enable_gqa -> [1, heads, queries, value_size]; with
return_aux also the logarithms of the sums of the softmax, [1, heads, queries], which have gradients too."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of queries (rows) and keys (columns), by the pairs that see each other."""

    partly: NDArray[np.bool_]
    """[blocks, blocks] at least one pair, but not all; or all except those behind the last token."""
    wholly: NDArray[np.bool_]

    @classmethod
    def of(
        cls, subtree_ends: NDArray[np.int32], queries: NDArray[np.int64] | None = None, window: int | None = None
    ) -> Blocks:
        """
        Args:
            subtree_ends: see `PackedSequences`.
            queries: tokens that attend, ascending; all if None. Pairs in the gaps of a block count as partly seen.
            window: see `AttentionForm`.
        """
        tokens = len(subtree_ends)
        if queries is None:
            queries = np.arange(tokens)
        rows, keys = np.arange(0, len(queries), BLOCK), np.arange(0, tokens, BLOCK)
        first_query = queries[rows][:, None]
        last_query = queries[np.minimum(rows + BLOCK, len(queries)) - 1][:, None]
        last_ends = np.maximum.reduceat(subtree_ends, keys)
        first_ends = np.minimum.reduceat(subtree_ends, keys)
        # Query q sees key k if k <= q < subtree_ends[k]. So a block of keys is seen in part if its first key is not
        # behind the last query and its longest-lived key outlives the first query. It is seen wholly if even its last
        # key is not behind the first query and even its shortest-lived key outlives the last query. "Seen" may be wrong
        # for a block whose early keys have ended and whose long-lived keys come late: it is computed under the mask.
        seen = (keys <= last_query) & (last_ends > first_query)
        full = (rows + BLOCK <= len(queries))[:, None] & (keys + BLOCK <= tokens)
        wholly = full & (keys + BLOCK - 1 <= first_query) & (first_ends > last_query)
        if window is not None:
            # The distance of a query and a key that it sees is the difference of their depths. So a block is seen only
            # if its shallowest query and its deepest key are close enough, and wholly if even its deepest query and its
            # shallowest key are.
            depth = depths(subtree_ends)
            shallowest, deepest = (of.reduceat(depth[queries], rows)[:, None] for of in (np.minimum, np.maximum))
            seen &= shallowest - np.maximum.reduceat(depth, keys) < window
            wholly &= deepest - np.minimum.reduceat(depth, keys) < window
        return cls(seen & ~wholly, wholly)

    @property
    def count(self) -> int:
        return int(self.partly.sum() + self.wholly.sum())


@dataclass(frozen=True, slots=True)
class TreeLayout:
    kernel: Attend
    mask: BlockMask
    mask_within: Callable[[int], BlockMask]  # mask of layers with this window

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm = PLAIN) -> Tensor:
        queries = len(query)
        value = value.contiguous()  # as in `VarlenLayout.attend`
        query, key, value = (_padded(each).transpose(0, 1)[None] for each in (query, key, value))
        mask = self.mask if form.window is None else self.mask_within(form.window)
        attend = partial(self.kernel, query, key, value, block_mask=mask, scale=form.scale, enable_gqa=True)
        if form.sinks is None:
            attended = attend()
        else:
            from torch.nn.attention.flex_attention import AuxRequest  # since torch 2.9

            without, aux = attend(return_aux=AuxRequest(lse=True))
            attended = form.left(without, aux.lse)
        return attended[0].transpose(0, 1)[:queries].flatten(1)


def compiled_attention(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
    """Attend by FlexAttention's compiled kernel; uncompiled it would store all scores. Its precision in fp32 is that of
    `torch.set_float32_matmul_precision`."""
    config = torch._dynamo.config
    if config.recompile_limit < MOST_KERNELS:  # at each call, because newer releases keep it separately for each thread
        config.recompile_limit = MOST_KERNELS
    options = FP32_BLOCKS if query.dtype is torch.float32 else None
    return _compiled()(query, key, value, kernel_options=options, **given)


@cache
def _compiled() -> Callable[..., Any]:
    # dynamic: for any number of tokens. fullgraph: raise instead of attending uncompiled.
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True, fullgraph=True)
    return compiled


def tree_layout(
    packed: PackedSequences, device: torch.device, kernel: Attend = compiled_attention, part: Tensor | None = None
) -> TreeLayout:
    """Build the layout of packed sequences, or of a part of them (see `Kernels.attention_layout`), for one kernel."""
    queries = torch.arange(len(packed.subtree_ends)) if part is None else part
    # Padding: queries see what the last one sees, and nothing sees keys with end 0.
    queries = torch.cat((queries, queries[-1:].expand(max(0, FEWEST_TOKENS - len(queries)))))
    mask = partial(_mask, _padded(packed.subtree_ends), queries, device)
    return TreeLayout(kernel, mask(), cache(mask))


def _mask(subtree_ends: Tensor, queries: Tensor, device: torch.device, window: int | None = None) -> BlockMask:
    blocks = Blocks.of(subtree_ends.numpy(), queries.numpy(), window)
    ends, at = (each.to(device, non_blocking=True) for each in (subtree_ends, queries))

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= at[query]) & (at[query] < ends[key])

    seen = sees
    if window is not None:
        of_tokens = torch.from_numpy(depths(subtree_ends.numpy()))
        depth, beyond = (each.to(device, non_blocking=True) for each in (of_tokens, of_tokens[queries] - window))

        # By tensors alone: torch would compile another kernel for each number.
        def seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= at[query]) & (at[query] < ends[key]) & (beyond[query] < depth[key])

    mask = BlockMask.from_kv_blocks(
        *_in_order(blocks.partly),
        *_in_order(blocks.wholly),
        BLOCK_SIZE=BLOCK,
        mask_mod=seen,
        seq_lengths=(len(queries), len(ends)),
    )
    for name, each in vars(mask).items():  # `BlockMask.to` would wait for each tensor
        if isinstance(each, Tensor):
            setattr(mask, name, each.to(device, non_blocking=True))
    return mask


def _padded(tokens: Tensor) -> Tensor:
    """Append zeros to [tokens, ...] up to FEWEST_TOKENS."""
    missing = max(0, FEWEST_TOKENS - len(tokens))
    return torch.cat((tokens, tokens.new_zeros(missing, *tokens.shape[1:]))) if missing else tokens


def _in_order(blocks: NDArray[np.bool_]) -> tuple[Tensor, Tensor]:
    """[1, 1, rows] number of blocks in each row, and [1, 1, rows, columns] their columns, which come first."""
    counts = torch.from_numpy(blocks.sum(1, dtype=np.int32))
    order = torch.from_numpy(np.argsort(~blocks, axis=1, kind="stable").astype(np.int32))
    return counts[None, None], order[None, None]
