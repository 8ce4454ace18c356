"""Attention of one new token a sequence to keys and values that lie in pages: what is asked for, and by gathering.

What reads pages itself are a GPU's kernels (paged_kernels.py) and, in fp32, a CPU's (sparse_attention.py). Elsewhere
what a sequence has is gathered, layer by layer, and attended to by torch's dense kernel, which is half as fast again
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

from megatron_rl.platform.dense_attention import bucket_length


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
class Bucket:
    """Rows that are gathered up to the same length."""

    rows: Tensor | None
    """[members] which; all where None."""
    parts: Tensor
    """[members * kv_heads * pages] page * kv_heads + head, as they are gathered."""
    length: int
    visible: Tensor | None
    """[members, 1, 1, length] which of them each row sees; all where None."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See `PagedAttention.attend`; of the members."""
        if self.rows is not None:
            query = query.index_select(0, self.rows)
        members, heads, head_size = query.shape
        shape = (members, keys.shape[1], -1, head_size)
        keys, values = (
            each.flatten(0, 1).index_select(0, self.parts).view(shape)[:, :, : self.length] for each in (keys, values)
        )
        # The query heads that share a key/value head stand in for query positions: grouped-query attention
        # without repeating keys and values.
        out = scaled_dot_product_attention(
            query.view(members, keys.shape[1], heads // keys.shape[1], head_size), keys, values, attn_mask=self.visible
        )
        return out.reshape(members, heads * head_size)


@dataclass(frozen=True, slots=True)
class GatheredAttention:
    """Implements `PagedAttention`."""

    buckets: tuple[Bucket, ...]
    order: Tensor | None
    """[rows] where in the buckets each row is; as they are where None."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See `PagedAttention.attend`."""
        attended = [bucket.attend(query, keys, values) for bucket in self.buckets]
        return attended[0] if self.order is None else torch.cat(attended).index_select(0, self.order)


def gathered_attention(rows: PagedRows) -> GatheredAttention:
    """All rows up to the longest: the host need not know how long each is."""
    return GatheredAttention((_bucket(rows, None, rows.longest, masked=True),), None)


def bucketed_attention(rows: PagedRows) -> GatheredAttention:
    """Rows of about one length together, on a device whose `bounds` are exact: short ones do not wait for long ones,
    and what a row's attention is summed up from does not depend on the others."""
    width = rows.table.shape[1] * rows.page_tokens
    padded = [min(bucket_length(length), width) for length in rows.bounds.tolist()]
    members: dict[int, list[int]] = {}
    for row, length in enumerate(padded):
        members.setdefault(length, []).append(row)
    if len(members) == 1:
        return GatheredAttention((_bucket(rows, None, padded[0], masked=bool((rows.bounds < padded[0]).any())),), None)
    buckets = []
    for length, of_length in members.items():
        masked = bool((rows.bounds[of_length] < length).any())
        buckets.append(_bucket(rows, torch.tensor(of_length), length, masked))
    order = torch.tensor([row for of_length in members.values() for row in of_length]).argsort()
    return GatheredAttention(tuple(buckets), order)


def _bucket(rows: PagedRows, members: Tensor | None, length: int, masked: bool) -> Bucket:
    table, lengths = rows.table, rows.lengths
    if members is not None:
        table, lengths = table.index_select(0, members), lengths.index_select(0, members)
    heads = torch.arange(rows.kv_heads, device=table.device)
    pages = table[:, : -(-length // rows.page_tokens)]
    parts = pages[:, None] * rows.kv_heads + heads[:, None]
    visible = (torch.arange(length, device=table.device) < lengths[:, None])[:, None, None] if masked else None
    return Bucket(members, parts.flatten(), length, visible)
