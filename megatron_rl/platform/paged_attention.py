"""Attention of one new token per sequence to a paged cache: the interface, and an implementation that gathers.

GPU kernels (flash_kernels.py) and CPU kernels (sparse_attention.py) read pages in place. Elsewhere the pages of a
sequence are gathered, layer by layer, for torch's dense kernel, which is half as fast again if the tokens of a head
are contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_rl.platform.flash_kernels import PagedAttend


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Sequences in pages, each with one new token at its end."""

    table: Tensor
    """[rows, pages] int32 on the device: pages of each row from its first token on, padded with arbitrary ones."""
    lengths: Tensor
    """[rows] on the device: tokens of each row."""
    bounds: NDArray[np.int64]
    """[rows] upper bounds of `lengths` that the host knows without waiting for the device."""
    page_tokens: int
    heads: int
    """Query heads, a multiple of `kv_heads`."""
    kv_heads: int

    @property
    def longest(self) -> int:
        """Upper bound of the longest row's tokens."""
        return min(int(self.bounds.max()), self.table.shape[1] * self.page_tokens)


class PagedAttention(Protocol):
    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend in one layer.

        query [rows, heads, head_size]; keys and values of all pages, including the new tokens, [pages, page_tokens,
        kv_heads, head_size], or [pages, kv_heads, page_tokens, head_size] if they are gathered -> [rows, heads *
        head_size]
        """


@dataclass(frozen=True, slots=True)
class GatheredAttention:
    """PagedAttention that gathers all rows up to the same length."""

    parts: Tensor
    """[rows * kv_heads * pages] page * kv_heads + head, in gathered order."""
    visible: Tensor
    """[rows, 1, 1, length] gathered tokens that each row sees."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        rows, heads, head_size = query.shape
        kv_heads, length = keys.shape[1], self.visible.shape[-1]
        keys, values = (
            each.flatten(0, 1).index_select(0, self.parts).view(rows, kv_heads, -1, head_size)[:, :, :length]
            for each in (keys, values)
        )
        # The query heads of a key/value head take the dimension of query positions: grouped-query attention without
        # repeating keys and values.
        query = query.view(rows, kv_heads, heads // kv_heads, head_size)
        out = scaled_dot_product_attention(query, keys, values, attn_mask=self.visible)
        return out.reshape(rows, heads * head_size)


def gathered_attention(rows: PagedRows) -> GatheredAttention:
    """Gather all rows up to the longest, so that the host need not know the others' lengths."""
    device, length = rows.table.device, rows.longest
    heads = torch.arange(rows.kv_heads, device=device)
    pages = rows.table[:, : -(-length // rows.page_tokens)]
    parts = pages[:, None] * rows.kv_heads + heads[:, None]
    visible = (torch.arange(length, device=device) < rows.lengths[:, None])[:, None, None]
    return GatheredAttention(parts.flatten(), visible)


@dataclass(frozen=True, slots=True)
class KernelAttention:
    """PagedAttention by a kernel, with the same rows in every layer."""

    kernel: PagedAttend
    table: Tensor
    lengths: Tensor
    """[rows] int32."""
    longest: int

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return self.kernel(query, keys, values, self.table, self.lengths, self.longest).flatten(1)
