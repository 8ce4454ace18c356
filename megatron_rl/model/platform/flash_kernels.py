"""Flash kernels of a GPU: the ones that can be imported here, from Transformer Engine, flash-attn or torch, and our own
for pages."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_rl.model.platform.attention import AttentionForm
from megatron_rl.model.platform.gpu_calls import FLASH_ATTN, TRANSFORMER_ENGINE, check_package

logger = logging.getLogger(__name__)

VarlenAttend = Callable[[Tensor, Tensor, Tensor, Tensor, int, AttentionForm], Tensor]
"""query [tokens, heads, head_size], key and value [tokens, kv_heads, head_size], cu_seqlens [sequences + 1] int32 on
the same device, tokens of the longest sequence, form without sinks -> [tokens, heads, head_size]: causal attention
within each sequence."""
PagedAttend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, AttentionForm], Tensor]
"""query [rows, heads, head_size], keys and values [pages, page_tokens, kv_heads, head_size], table [rows, pages] int32,
lengths [rows] int32, upper bound of the lengths, number of splits, form -> [rows, heads, head_size]: attention of the
last token of each row. The keys up to the upper bound are divided into that many equal splits, each for a block of the
GPU. The borders do not depend on the rows, so neither does the order of a row's sum."""
ChunkAttend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, tuple[int, int], AttentionForm], Tensor]
"""query [tokens, heads, head_size], keys and values [pages, page_tokens, kv_heads, head_size], table [sequences, pages]
int32, edges of the queries and of the keys, each [sequences + 1] int32, most queries and most keys of a sequence, form
-> [tokens, heads, head_size]: causal attention of the last tokens of each sequence to all of its tokens."""


@dataclass(frozen=True, slots=True)
class VarlenKernel:
    """A flash kernel for packed sequences, in half precision only, and the name of its package."""

    name: str
    attend: VarlenAttend


@dataclass(frozen=True, slots=True)
class PagedKernel:
    name: str
    attend: PagedAttend
    attend_chunks: ChunkAttend
    fp32: bool
    page_multiple: int  # divisor of the page sizes that they support

    def reads(self, dtype: torch.dtype, page_tokens: int) -> bool:
        return (self.fp32 or dtype is not torch.float32) and page_tokens % self.page_multiple == 0


Kernel = TypeVar("Kernel", VarlenKernel, PagedKernel)


def find_varlen_kernel() -> VarlenKernel | None:
    """Return the first kernel that can be imported: Transformer Engine's, which selects the fastest for the GPU,
    cuDNN's or flash-attn's; flash-attn's; torch's own, with grouped queries since 2.12. None without any."""
    return next(_importable(_transformer_engine, _flash_attn, _torch), None)


def find_paged_kernels() -> tuple[PagedKernel, ...]:
    """Return the kernels that can be imported, the fastest first: flash-attn's, then our own in Triton.

    FlashAttention 3 is not among them: with several splits it divides the keys of a row by what the other rows of the
    batch need (`prepare_varlen_num_blocks_kernel` in its hopper/flash_prepare_scheduler.cu)."""
    return tuple(_importable(_paged_flash_attn, _paged_triton))


def _importable(*finders: Callable[[], Kernel | None]) -> Iterator[Kernel]:
    for find in finders:
        try:
            kernel = find()
        except (ImportError, OSError) as error:  # OSError: one of its libraries is missing
            logger.debug("no kernel by %s: %s", find.__name__.lstrip("_"), error)
        else:
            if kernel is not None:
                yield kernel


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
    def module(heads: int, kv_heads: int, head_size: int, window: int | None, scale: float | None) -> Any:
        return DotProductAttention(
            num_attention_heads=heads,
            kv_channels=head_size,
            num_gqa_groups=kv_heads,
            attention_dropout=0.0,
            qkv_format="thd",
            attn_mask_type="padding_causal",
            window_size=_before(window),
            softmax_scale=scale,
        )

    def attend(
        query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, form: AttentionForm
    ) -> Tensor:
        attended: Tensor = module(query.shape[1], key.shape[1], query.shape[2], form.window, form.scale)(
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

    def attend(
        query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, form: AttentionForm
    ) -> Tensor:
        edges = cu_seqlens, cu_seqlens, longest, longest
        attended: Tensor = flash_attn.flash_attn_varlen_func(
            query, key, value, *edges, causal=True, softmax_scale=form.scale, window_size=_before(form.window)
        )
        return attended

    return VarlenKernel(f"flash-attn {flash_attn.__version__}", attend)


def _torch() -> VarlenKernel | None:
    from torch.nn.attention.varlen import varlen_attn

    if "enable_gqa" not in inspect.signature(varlen_attn).parameters:
        return None

    def attend(
        query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, form: AttentionForm
    ) -> Tensor:
        edges = cu_seqlens, cu_seqlens, longest, longest
        attended = varlen_attn(
            query, key, value, *edges, scale=form.scale, window_size=_before(form.window), enable_gqa=True
        )
        assert isinstance(attended, Tensor)  # no extra results were requested
        return attended

    return VarlenKernel(f"torch {torch.__version__} varlen_attn", attend)


def _paged_flash_attn() -> PagedKernel:
    _require(FLASH_ATTN)
    import flash_attn

    def attend(
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        table: Tensor,
        lengths: Tensor,
        _longest: int,
        splits: int,
        form: AttentionForm,
    ) -> Tensor:
        attended, log_sums = flash_attn.flash_attn_with_kvcache(
            query[:, None],
            keys,
            values,
            cache_seqlens=lengths,
            block_table=table,
            causal=True,
            softmax_scale=form.scale,
            window_size=_before(form.window),
            num_splits=splits,
            return_softmax_lse=True,  # [rows, heads, 1]
        )
        return form.left(attended[:, 0, :, None], log_sums)[:, :, 0]

    def attend_chunks(
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        table: Tensor,
        of_queries: Tensor,
        of_keys: Tensor,
        most: tuple[int, int],
        form: AttentionForm,
    ) -> Tensor:
        attended, log_sums, _probabilities = flash_attn.flash_attn_varlen_func(
            query,
            keys,
            values,
            of_queries,
            of_keys,
            *most,
            causal=True,
            softmax_scale=form.scale,
            window_size=_before(form.window),
            block_table=table,
            return_attn_probs=True,  # log_sums [heads, tokens]
        )
        return form.left(attended.transpose(0, 1), log_sums).transpose(0, 1)

    return PagedKernel(f"flash-attn {flash_attn.__version__}", attend, attend_chunks, fp32=False, page_multiple=256)


def _before(window: int | None) -> tuple[int, int]:
    """Tokens before and behind a token that it sees, -1 for all of them, as the packages take a window."""
    return (-1 if window is None else window - 1), 0


def _paged_triton() -> PagedKernel:
    import triton

    from megatron_rl.model.platform.triton_attention import attend, attend_chunks

    return PagedKernel(f"Triton {triton.__version__}", attend, attend_chunks, fp32=True, page_multiple=1)
