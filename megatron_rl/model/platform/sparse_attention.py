"""Attention of one new token per sequence to a paged cache, on a CPU and always in fp32, which takes half the time of
gathering bf16 and attending to that.

What the queries see is a sparse matrix, [queries, tokens of the cache], for which torch has kernels: selected products
(`sampled_addmm`), and sums of weighted rows of a table (`embedding_bag`). So nothing is gathered, almost nothing is
computed for padding, and the result of a query depends on its own sequence alone, bit for bit.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_rl.model.platform.attention import PLAIN, AttentionForm
from megatron_rl.model.platform.paged_attention import PagedRows

LANES = 16
"""Largest number of elements that are summed at once. The order of a sum of fewer depends on their number."""


@dataclass(frozen=True, slots=True)
class Gaps:
    """Padding of queries with fewer pages than the longest, up to a multiple of full vectors."""

    targets: Tensor  # [seen] index in `scores` of each page of a query
    scores: Tensor  # [queries * pages, page_tokens] minus infinity in the padding


@dataclass(frozen=True, slots=True)
class SparseAttention:
    """PagedAttention for pages with contiguous tokens of a head.

    Each head of each row is a query. It sees all pages in which its sequence has tokens.
    """

    offsets: Tensor  # [queries + 1] start of each query in `entries`, and the end
    entries: Tensor
    """[seen * page_tokens] rows of keys and values: (page * kv_heads + head) * page_tokens + index in the page."""
    beyond: Tensor  # [seen * page_tokens] minus infinity behind the last token of a sequence, else 0
    products: Tensor  # sparse [queries, tokens of the cache up to the last one seen]; reused by every layer
    gaps: Gaps | None
    left: Tensor  # [seen, 1] tokens of the sequence from the first one of a page on
    within: dict[int, Tensor] = field(default_factory=dict)  # `beyond` of layers with this window

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, form: AttentionForm = PLAIN) -> Tensor:
        rows, heads, head_size = query.shape
        dtype = query.dtype
        query, keys, values = (each.reshape(-1, head_size) for each in (query.to(keys.dtype), keys, values))
        keys = keys[: self.products.shape[1]]
        beyond = self.beyond if form.window is None else self._within(form.window)
        products = self.products.values().copy_(beyond)  # sampled_addmm adds to it
        torch.sparse.sampled_addmm(self.products, query, keys.t(), alpha=form.factor(head_size), out=self.products)
        sinks = None if form.sinks is None else form.sinks.float().expand(rows, heads).reshape(-1, 1)
        attended: Tensor = torch.embedding_bag(
            values,
            self.entries,
            self.offsets,
            mode=0,
            per_sample_weights=self._softmax(products, query.shape[0], sinks),
            include_last_offset=True,
        )[0]
        return attended.view(rows, -1).to(dtype)

    def _within(self, window: int) -> Tensor:
        """`beyond`, and minus infinity before the last `window` tokens of a sequence too."""
        if window not in self.within:
            within = torch.arange(len(self.beyond) // len(self.left), dtype=self.left.dtype)
            before = (self.left - within > window).flatten()
            self.within[window] = self.beyond.masked_fill(before, -torch.inf)
        return self.within[window]

    def _softmax(self, products: Tensor, queries: int, sinks: Tensor | None) -> Tensor:
        """Softmax within each query and beside its sink, [seen * page_tokens] -> the same. sinks: [queries, 1]."""
        if self.gaps is None:
            return _beside(products.view(queries, -1), sinks).reshape(-1)
        scores = self.gaps.scores
        scores.index_copy_(0, self.gaps.targets, products.view(-1, scores.shape[1]))
        weights = _beside(scores.view(queries, -1), sinks).reshape(scores.shape)
        return weights.index_select(0, self.gaps.targets).view(-1)


def _beside(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax of each row beside its sink, [rows, columns], [rows, 1] -> [rows, columns]."""
    if sinks is None:
        return scores.softmax(-1)
    # A full vector before the scores keeps the order of their sum.
    first = pad(sinks, (0, LANES - 1), value=-torch.inf)
    return torch.cat((first, scores), dim=-1).softmax(-1)[:, LANES:]


def sparse_attention(rows: PagedRows) -> SparseAttention:
    """Build the attention of all rows at once, whatever their lengths, on a device whose `bounds` are exact."""
    _silence_first_warnings()
    tokens, repeated = rows.page_tokens, rows.heads // rows.kv_heads
    pages = -(-rows.bounds // tokens).astype(np.int32)
    # Example: pages of 2 tokens, 2 key/value heads, 2 query heads, a sequence of 3 tokens in pages 5 and 0. Query 1
    # (head 1) sees entries 22 23 (page 5: (5 * 2 + 1) * 2) and 2 3 (page 0: (0 * 2 + 1) * 2), and `beyond` is
    # 0 0 0 -inf, because the second page has one token. A query is thus a row of a sparse matrix in CSR: `offsets` are
    # its row pointers and `entries` its columns, which need not ascend.
    of_query = np.repeat(pages, rows.heads)
    offsets = np.zeros(len(of_query) + 1, dtype=np.int32)
    np.cumsum(of_query, out=offsets[1:])
    query = np.repeat(np.arange(len(of_query), dtype=np.int32), of_query)
    number = np.arange(len(query), dtype=np.int32) - offsets[query]
    row, head = query // rows.heads, query % rows.heads // repeated
    page = rows.table.numpy()[row, number]
    within = np.arange(tokens, dtype=np.int32)
    entries = (((page * rows.kv_heads + head) * tokens)[:, None] + within).ravel()
    left = rows.bounds.astype(np.int32)[row] - number * tokens
    beyond = torch.from_numpy(np.where(within < left[:, None], np.float32(0), np.float32(-np.inf)).ravel())
    offsets *= tokens
    at, of = torch.from_numpy(entries), torch.from_numpy(offsets)
    shape = len(of_query), (int(page.max()) + 1) * rows.kv_heads * tokens
    products = torch.sparse_csr_tensor(of, at, torch.empty_like(beyond), shape, check_invariants=False)
    multiple = LANES // math.gcd(LANES, tokens)
    room = -(-int(pages.max()) // multiple) * multiple
    gaps = None
    if pages.min() < room:
        scores = torch.full((len(of_query) * room, tokens), -torch.inf)
        gaps = Gaps(torch.from_numpy(query.astype(np.int64) * room + number), scores)
    return SparseAttention(of, at, beyond, products, gaps, torch.from_numpy(left[:, None]))


@cache
def _silence_first_warnings() -> None:
    """Make torch's first sparse matrix without its warnings that support is in beta and, in torch 2.11, that nobody
    checks invariants."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
        nothing = torch.empty(0, dtype=torch.int64)
        torch.sparse_csr_tensor(torch.zeros(1, dtype=torch.int64), nothing, torch.empty(0), (0, 0))
