"""Attention of one new token a sequence to keys and values in pages, read where they lie: on a CPU, in fp32.

What the queries see is a sparse matrix, [queries, places of the cache], and torch has kernels for such: the products
that it asks for (`sampled_addmm`), and sums of weighted rows of a table (`embedding_bag`). So nothing is gathered, next
to nothing computed for padding, and what a query gets depends on its own sequence alone, bit for bit.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from megatron_rl.platform.paged_attention import PagedRows

LANES = 16
"""Numbers that are added up at once, at most: of fewer, the order depends on how many there are."""


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
    """[seen, page_tokens] minus infinity behind the last token of a sequence, else 0."""
    targets: Tensor
    """[seen] where in `scores` each page of a query is."""
    scores: Tensor
    """[queries * pages, page_tokens] minus infinity where there is none."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See `PagedAttention.attend`."""
        head_size = query.shape[2]
        queries, keys, values = (each.reshape(-1, head_size) for each in (query, keys, values))
        shape = len(queries), len(keys)
        none = torch.zeros(self.places.shape)  # is added to the products, NaN even where 0 times as much is
        seen = torch.sparse_csr_tensor(self.offsets, self.places, none, shape, check_invariants=False)
        torch.sparse.sampled_addmm(seen, queries, keys.t(), beta=0.0, alpha=head_size**-0.5, out=seen)
        self.scores.index_copy_(0, self.targets, seen.values().view_as(self.beyond) + self.beyond)
        weights = self.scores.view(len(queries), -1).softmax(-1).view_as(self.scores).index_select(0, self.targets)
        attended: Tensor = torch.embedding_bag(
            values, self.places, self.offsets, mode=0, per_sample_weights=weights.view(-1), include_last_offset=True
        )[0]
        return attended.view(len(query), -1)


def sparse_attention(rows: PagedRows) -> SparseAttention:
    """All rows at once, however different their lengths."""
    _warn_of_nothing()
    tokens, width = rows.page_tokens, rows.table.shape[1]
    pages = ((rows.lengths + (tokens - 1)) // tokens).repeat_interleave(rows.heads)
    offsets = torch.cat((pages.new_zeros(1), pages.cumsum(0)))
    query = torch.arange(len(pages)).repeat_interleave(pages)
    number = torch.arange(len(query)) - offsets.index_select(0, query)
    row, head = query // rows.heads, query % rows.heads // (rows.heads // rows.kv_heads)
    page = rows.table.flatten().index_select(0, row * width + number)
    within = torch.arange(tokens)
    places = ((page * rows.kv_heads + head) * tokens)[:, None] + within
    left = rows.lengths.index_select(0, row) - number * tokens
    beyond = torch.zeros(places.shape).masked_fill_(within >= left[:, None], -torch.inf)
    multiple = LANES // math.gcd(LANES, tokens)
    of_query = -(-rows.longest // (tokens * multiple)) * multiple
    scores = torch.full((len(pages) * of_query, tokens), -torch.inf)
    return SparseAttention(offsets * tokens, places.flatten(), beyond, query * of_query + number, scores)


@cache
def _warn_of_nothing() -> None:
    """torch says of its first sparse matrix that not all can be done with such."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        torch.empty(0, 0, layout=torch.sparse_csr)
