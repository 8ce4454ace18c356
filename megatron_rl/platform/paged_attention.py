"""Attention of one new token a sequence to keys and values that lie in pages: what is asked for, and by gathering.

What reads pages itself are a GPU's kernels (paged_kernels.py) and a CPU's (sparse_attention.py). Elsewhere what a
sequence has is gathered, layer by layer, and attended to by torch's dense kernel, which is half as fast again
where the tokens of a head lie together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Sequences in pages, each with one new token, its last."""

    table: Tensor
    """[rows, pages] int32, on the device: the pages of each, from its first token on; more than it has are any."""
    lengths: Tensor
    """[rows] on the device: tokens of each."""
    bounds: NDArray[np.int64]
    """[rows] the most that `lengths` can be, as far as the host knows without looking."""
    page_tokens: int
    heads: int
    """Of the queries, the same number for each of ..."""
    kv_heads: int

    @property
    def longest(self) -> int:
        """Tokens of the longest, at most."""
        return min(int(self.bounds.max()), self.table.shape[1] * self.page_tokens)


class PagedAttention(Protocol):
    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of one layer.

        query [rows, heads, head_size], keys and values of all pages, the new tokens' among them, [pages, page_tokens,
        kv_heads, head_size], or [pages, kv_heads, page_tokens, head_size] where they are gathered -> [rows, heads *
        head_size]
        """
        ...


@dataclass(frozen=True, slots=True)
class GatheredAttention:
    """Implements `PagedAttention`: all rows are gathered up to the same length."""

    parts: Tensor
    """[rows * kv_heads * pages] page * kv_heads + head, as they are gathered."""
    visible: Tensor
    """[rows, 1, 1, length] which of the tokens gathered each row sees."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See `PagedAttention.attend`."""
        rows, heads, head_size = query.shape
        kv_heads, length = keys.shape[1], self.visible.shape[-1]
        keys, values = (
            each.flatten(0, 1).index_select(0, self.parts).view(rows, kv_heads, -1, head_size)[:, :, :length]
            for each in (keys, values)
        )
        # The query heads that share a key/value head stand in for query positions: grouped-query attention
        # without repeating keys and values.
        query = query.view(rows, kv_heads, heads // kv_heads, head_size)
        out = scaled_dot_product_attention(query, keys, values, attn_mask=self.visible)
        return out.reshape(rows, heads * head_size)


def gathered_attention(rows: PagedRows) -> GatheredAttention:
    """All rows up to the longest: the host need not know how long each is."""
    device, length = rows.table.device, rows.longest
    heads = torch.arange(rows.kv_heads, device=device)
    pages = rows.table[:, : -(-length // rows.page_tokens)]
    parts = pages[:, None] * rows.kv_heads + heads[:, None]
    visible = (torch.arange(length, device=device) < rows.lengths[:, None])[:, None, None]
    return GatheredAttention(parts.flatten(), visible)
