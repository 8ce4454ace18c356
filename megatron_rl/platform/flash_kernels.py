"""Flash kernels of a GPU: the ones that can be imported here, from Transformer Engine, flash-attn or torch.

All support half precision only.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_rl.platform.gpu_calls import FLASH_ATTN, TRANSFORMER_ENGINE, check_package

logger = logging.getLogger(__name__)

PAGE_MULTIPLE = 256
"""Divisor of page sizes that flash-attn 2 requires, including torch's own kernel."""

VarlenAttend = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
"""query [tokens, heads, head_size], key and value [tokens, kv_heads, head_size], cu_seqlens [sequences + 1] int32 on
the same device, tokens of the longest sequence -> [tokens, heads, head_size]: causal attention within each sequence."""
PagedAttend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int], Tensor]
"""query [rows, heads, head_size], keys and values [pages, page_tokens, kv_heads, head_size], table [rows, pages] int32,
lengths [rows] int32, upper bound of the lengths, number of splits -> [rows, heads, head_size]: attention of the last
token of each row. The keys up to the upper bound are divided into that many equal splits, each for a block of the GPU.
The borders do not depend on the rows, so neither does the order of a row's sum."""
ChunkAttend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, int], Tensor]
"""query [tokens, heads, head_size], keys and values [pages, page_tokens, kv_heads, head_size], table [sequences, pages]
int32, edges of the queries and of the keys, each [sequences + 1] int32, most queries and most keys of a sequence
-> [tokens, heads, head_size]: causal attention of the last tokens of each sequence to all of its tokens."""


@dataclass(frozen=True, slots=True)
class VarlenKernel:
    """A flash kernel for packed sequences and the name of its package."""

    name: str
    attend: VarlenAttend


@dataclass(frozen=True, slots=True)
class PagedKernel:
    """Flash kernels that read pages and the name of their package."""

    name: str
    attend: PagedAttend
    """Kernel for decoding."""
    attend_chunks: ChunkAttend
    """Kernel for prefills that continue sequences."""


Kernel = TypeVar("Kernel", VarlenKernel, PagedKernel)


def find_varlen_kernel() -> VarlenKernel | None:
    """Return the first kernel that can be imported: Transformer Engine's, which selects the fastest for the GPU,
    cuDNN's or flash-attn's; flash-attn's; torch's own, with grouped queries since 2.12. None without any."""
    return _first(_transformer_engine, _flash_attn, _torch)


def find_paged_kernel() -> PagedKernel | None:
    """Return the first kernel that can be imported: flash-attn's, which is made for single queries, or torch's own,
    since 2.13; None without either.

    FlashAttention 3 is not among them: with several splits it divides the keys of a row by what the other rows of the
    batch need (`prepare_varlen_num_blocks_kernel` in its hopper/flash_prepare_scheduler.cu)."""
    return _first(_paged_flash_attn, _paged_torch)


def _first(*finders: Callable[[], Kernel | None]) -> Kernel | None:
    for find in finders:
        try:
            kernel = find()
        except (ImportError, OSError) as error:  # OSError: one of its libraries is missing
            logger.debug("no kernel by %s: %s", find.__name__.lstrip("_"), error)
        else:
            if kernel is not None:
                return kernel
    return None


def _require(package: str) -> None:
    """Raise ImportError if an installed package does not accept the calls below."""
    fit = check_package(package)
    if fit.problems:
        logger.warning("%s; it is not used", fit)
        raise ImportError(str(fit))


def _transformer_engine() -> VarlenKernel:
    _require(TRANSFORMER_ENGINE)
    import transformer_engine
    from transformer_engine.pytorch import DotProductAttention

    @cache
    def module(heads: int, kv_heads: int, head_size: int) -> Any:
        return DotProductAttention(
            num_attention_heads=heads,
            kv_channels=head_size,
            num_gqa_groups=kv_heads,
            attention_dropout=0.0,
            qkv_format="thd",
            attn_mask_type="padding_causal",
        )

    def attend(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        attended: Tensor = module(query.shape[1], key.shape[1], query.shape[2])(
            query,
            key,
            value,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            pad_between_seqs=False,  # otherwise the host reads it from the device
        )
        return attended.view(query.shape)

    return VarlenKernel(f"Transformer Engine {transformer_engine.__version__}", attend)


def _flash_attn() -> VarlenKernel:
    _require(FLASH_ATTN)
    import flash_attn

    def attend(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        attended: Tensor = flash_attn.flash_attn_varlen_func(
            query, key, value, cu_seqlens, cu_seqlens, longest, longest, causal=True
        )
        return attended

    return VarlenKernel(f"flash-attn {flash_attn.__version__}", attend)


def _torch() -> VarlenKernel | None:
    from torch.nn.attention.varlen import varlen_attn

    if "enable_gqa" not in inspect.signature(varlen_attn).parameters:
        return None

    def attend(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        attended = varlen_attn(
            query, key, value, cu_seqlens, cu_seqlens, longest, longest, window_size=(-1, 0), enable_gqa=True
        )
        assert isinstance(attended, Tensor)  # no extra results were requested
        return attended

    return VarlenKernel(f"torch {torch.__version__} varlen_attn", attend)


def _paged_flash_attn() -> PagedKernel:
    _require(FLASH_ATTN)
    import flash_attn

    def attend(
        query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, _longest: int, splits: int
    ) -> Tensor:
        attended: Tensor = flash_attn.flash_attn_with_kvcache(
            query[:, None], keys, values, cache_seqlens=lengths, block_table=table, causal=True, num_splits=splits
        )
        return attended[:, 0]

    def attend_chunks(
        query: Tensor, keys: Tensor, values: Tensor, table: Tensor, of_queries: Tensor, of_keys: Tensor, *most: int
    ) -> Tensor:
        attended: Tensor = flash_attn.flash_attn_varlen_func(
            query, keys, values, of_queries, of_keys, *most, causal=True, block_table=table
        )
        return attended

    return PagedKernel(f"flash-attn {flash_attn.__version__}", attend, attend_chunks)


def _paged_torch() -> PagedKernel | None:
    # torch 2.12 has the same parameters, but accepts num_splits only with FlashAttention 3, which it does not contain.
    if torch.__version__ < "2.13":
        return None
    from torch.nn.attention.varlen import varlen_attn

    def attend(
        query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, longest: int, splits: int
    ) -> Tensor:
        edges = torch.arange(len(query) + 1, dtype=torch.int32, device=query.device)
        attended = varlen_attn(
            query,
            keys,
            values,
            edges,
            edges * longest,  # not read because of `seqused_k`, but required
            1,
            longest,
            # A last token sees all keys. With a causal window the kernel would read keys and values once for each query
            # head of a group, and newer releases would refuse to split them.
            window_size=(-1, -1),
            enable_gqa=True,
            seqused_k=lengths,
            block_table=table,
            num_splits=splits if query.shape[1] > keys.shape[2] else 1,  # it splits only groups of query heads
        )
        assert isinstance(attended, Tensor)  # no extra results were requested
        return attended

    def attend_chunks(
        query: Tensor, keys: Tensor, values: Tensor, table: Tensor, of_queries: Tensor, of_keys: Tensor, *most: int
    ) -> Tensor:
        attended = varlen_attn(
            query,
            keys,
            values,
            of_queries,
            of_keys,
            *most,
            window_size=(-1, 0),
            enable_gqa=True,
            seqused_k=of_keys.diff(),
            block_table=table,
            num_splits=1,  # otherwise chosen by what is in the batch
        )
        assert isinstance(attended, Tensor)  # no extra results were requested
        return attended

    return PagedKernel(f"torch {torch.__version__} varlen_attn", attend, attend_chunks)
