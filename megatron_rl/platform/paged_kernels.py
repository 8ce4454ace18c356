"""GPU kernels that read keys and values from pages, from flash-attn or torch. Half precision only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

PAGE_MULTIPLE = 256
"""Divisor of page sizes that flash-attn 2 requires, including torch's own kernel."""

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int], Tensor]
"""query [rows, heads, head_size], keys and values [pages, page_tokens, kv_heads, head_size], table [rows, pages] int32,
lengths [rows] int32, upper bound of the lengths -> [rows, heads, head_size]: attention of the last token of each
row."""


@dataclass(frozen=True, slots=True)
class PagedKernel:
    """A flash kernel for pages and the name of its package."""

    name: str
    attend: Attend


def find_paged_kernel() -> PagedKernel | None:
    """Return the first kernel that can be imported: flash-attn's, which is made for single queries, or torch's own,
    since 2.13; None without either."""
    for find in (_flash_attn, _torch):
        try:
            kernel = find()
        except (ImportError, OSError) as error:  # OSError: one of its libraries is missing
            logger.debug("no paged attention by %s: %s", find.__name__.lstrip("_"), error)
        else:
            if kernel is not None:
                return kernel
    return None


def _flash_attn() -> PagedKernel:
    import flash_attn

    def attend(query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, longest: int) -> Tensor:
        attended: Tensor = flash_attn.flash_attn_with_kvcache(
            query[:, None], keys, values, cache_seqlens=lengths, block_table=table, causal=True, num_splits=1
        )
        return attended[:, 0]

    return PagedKernel(f"flash-attn {flash_attn.__version__}", attend)


def _torch() -> PagedKernel | None:
    # torch 2.12 has the same parameters, but accepts num_splits only with FlashAttention 3, which it does not contain.
    if torch.__version__ < "2.13":
        return None
    from torch.nn.attention.varlen import varlen_attn

    def attend(query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, longest: int) -> Tensor:
        edges = torch.arange(len(query) + 1, dtype=torch.int32, device=query.device)
        attended = varlen_attn(
            query,
            keys,
            values,
            edges,
            edges * longest,  # not read because of `seqused_k`, but required
            1,
            longest,
            window_size=(-1, 0),
            enable_gqa=True,
            seqused_k=lengths,
            block_table=table,
            num_splits=1,
        )
        assert isinstance(attended, Tensor)  # no extra results were requested
        return attended

    return PagedKernel(f"torch {torch.__version__} varlen_attn", attend)


@dataclass(frozen=True, slots=True)
class KernelAttention:
    """PagedAttention by a kernel, with the same rows in every layer."""

    kernel: Attend
    table: Tensor
    lengths: Tensor
    """[rows] int32."""
    longest: int

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return self.kernel(query, keys, values, self.table, self.lengths, self.longest).flatten(1)
