"""Attention of one new token a sequence to keys and values in pages, read where they lie: on a CPU, in fp32 whatever
the model's type, which takes half the time of gathering bf16 and attending to that.

What the queries see is a sparse matrix, [queries, places of the cache], and torch has kernels for such: the products
that it asks for (`sampled_addmm`), and sums of weighted rows of a table (`embedding_bag`). So nothing is gathered, next
to nothing computed for padding, and what a query gets depends on its own sequence alone, bit for bit.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from megatron_rl.platform.paged_attention import PagedRows

LANES = 16
"""Numbers that are added up at once, at most: of fewer, the order depends on how many there are."""


@dataclass(frozen=True, slots=True)
class Gaps:
    """Room behind the pages of each query, where some have more: as many as the longest and full vectors need."""

    targets: Tensor
    """[seen] where in `scores` each page of a query is."""
    scores: Tensor
    """[queries * pages, page_tokens] minus infinity where there is none."""


@dataclass(frozen=True, slots=True)
class SparseAttention:
    """Implements `PagedAttention` where the tokens of a head lie together in a page.

    Each head of each row is a query, and sees all of the pages that its sequence has tokens in.
    """

    offsets: Tensor
    """[queries + 1] where in `places` each begins, and the end."""
    places: Tensor
    """[seen * page_tokens] of keys and values: (page * kv_heads + head) * page_tokens + where in the page."""
    beyond: Tensor
    """[seen * page_tokens] minus infinity behind the last token of a sequence, else 0."""
    products: Tensor
    """Sparse [queries, places of the cache up to the last that is seen]: of one layer after the other."""
    gaps: Gaps | None

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See `PagedAttention.attend`."""
        rows, _, head_size = query.shape
        dtype = query.dtype
        query, keys, values = (each.reshape(-1, head_size) for each in (query.to(keys.dtype), keys, values))
        keys = keys[: self.products.shape[1]]
        products = self.products.values().copy_(self.beyond)  # which the products are added to
        torch.sparse.sampled_addmm(self.products, query, keys.t(), alpha=head_size**-0.5, out=self.products)
        attended: Tensor = torch.embedding_bag(
            values,
            self.places,
            self.offsets,
            mode=0,
            per_sample_weights=self._softmax(products, query.shape[0]),
            include_last_offset=True,
        )[0]
        return attended.view(rows, -1).to(dtype)

    def _softmax(self, products: Tensor, queries: int) -> Tensor:
        """Of each query's, [seen * page_tokens] -> the same."""
        if self.gaps is None:
            return products.view(queries, -1).softmax(-1).view(-1)
        scores = self.gaps.scores
        scores.index_copy_(0, self.gaps.targets, products.view(-1, scores.shape[1]))
        weights = scores.view(queries, -1).softmax(-1).view_as(scores)
        return weights.index_select(0, self.gaps.targets).view(-1)


def sparse_attention(rows: PagedRows) -> SparseAttention:
    """All rows at once, however different their lengths, on a device whose `bounds` are exact."""
    _warn_of_nothing()
    tokens, repeated = rows.page_tokens, rows.heads // rows.kv_heads
    pages = -(-rows.bounds // tokens).astype(np.int32)
    of_query = np.repeat(pages, rows.heads)
    offsets = np.zeros(len(of_query) + 1, dtype=np.int32)
    np.cumsum(of_query, out=offsets[1:])
    query = np.repeat(np.arange(len(of_query), dtype=np.int32), of_query)
    number = np.arange(len(query), dtype=np.int32) - offsets[query]
    row, head = query // rows.heads, query % rows.heads // repeated
    page = rows.table.numpy()[row, number]
    within = np.arange(tokens, dtype=np.int32)
    places = (((page * rows.kv_heads + head) * tokens)[:, None] + within).ravel()
    left = rows.bounds.astype(np.int32)[row] - number * tokens
    beyond = torch.from_numpy(np.where(within < left[:, None], np.float32(0), np.float32(-np.inf)).ravel())
    offsets *= tokens
    at, of = torch.from_numpy(places), torch.from_numpy(offsets)
    shape = len(of_query), (int(page.max()) + 1) * rows.kv_heads * tokens
    products = torch.sparse_csr_tensor(of, at, torch.empty_like(beyond), shape, check_invariants=False)
    multiple = LANES // math.gcd(LANES, tokens)
    room = -(-int(pages.max()) // multiple) * multiple
    gaps = None
    if pages.min() < room:
        scores = torch.full((len(of_query) * room, tokens), -torch.inf)
        gaps = Gaps(torch.from_numpy(query * np.int64(room) + number), scores)
    return SparseAttention(of, at, beyond, products, gaps)


@cache
def _warn_of_nothing() -> None:
    """torch says of its first sparse matrix that not all can be done with such."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        torch.empty(0, 0, layout=torch.sparse_csr)
