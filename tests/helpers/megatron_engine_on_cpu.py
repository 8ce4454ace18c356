"""megatron-core's dynamic engine on a machine without a GPU. Calls of CUDA and the two paged functions of flash-attn
are replaced by their definitions; all other code, including the arithmetic, is the engine's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from megatron.core.inference.contexts import dynamic_context
from megatron.core.transformer import attention
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@contextmanager
def megatron_engine_on_cpu() -> Iterator[None]:
    with ExitStack() as patches:
        for name in ("Event", "Stream", "nvtx._nvtx"):
            patches.enter_context(mock.patch(f"torch.cuda.{name}", mock.MagicMock()))
        patches.enter_context(mock.patch("torch.cuda.current_device", lambda: torch.device("cpu")))
        for name in ("arange", "empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like"):
            patches.enter_context(mock.patch(f"torch.{name}", _not_pinned(getattr(torch, name))))
        for name, stand_in in (
            ("is_fa_min_version", lambda _: True),
            ("flash_attn_varlen_func", _varlen),
            ("flash_attn_with_kvcache", _with_kvcache),
            ("rearrange", lambda tensor, _: tensor.flatten(2)),
        ):
            patches.enter_context(mock.patch.object(attention, name, stand_in))
        # The engine's own path without Triton.
        patches.enter_context(mock.patch.object(dynamic_context, "triton_append_key_value_cache", None))
        yield


def _not_pinned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, pin_memory=False, **named: make(*args, **named)


def _varlen(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    _longest_query: int,
    _longest_keys: int,
    *,
    softmax_scale: float,
    causal: bool,
    block_table: Tensor,
    **_: Any,
) -> Tensor:
    """query [tokens, heads, size], keys and values [pages, slots, groups, size], block_table [rows, pages]"""
    assert causal
    out = torch.zeros_like(query)  # padding belongs to no row
    for row, (first, end) in enumerate(zip(cu_queries[:-1].tolist(), cu_queries[1:].tolist(), strict=True)):
        length = int(cu_keys[row + 1] - cu_keys[row])
        if end > first:
            out[first:end] = _attend(query[first:end], keys, values, block_table[row], length, softmax_scale)
    return out


def _with_kvcache(
    *, q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, causal: bool, block_table: Tensor, **_: Any
) -> Tensor:
    """q [rows, 1, heads, size]"""
    assert causal
    out = torch.zeros_like(q)
    for row, length in enumerate(cache_seqlens.tolist()):
        if length:
            out[row] = _attend(q[row], k_cache, v_cache, block_table[row], length, q.shape[-1] ** -0.5)
    return out


def _attend(query: Tensor, keys: Tensor, values: Tensor, pages: Tensor, length: int, scale: float) -> Tensor:
    """Attention of the last queries of a sequence, [queries, heads, size], to all of it."""
    used = pages[: -(-length // keys.shape[1])].long()
    seen, held = (cache[used].flatten(0, 1)[:length].transpose(0, 1)[None] for cache in (keys, values))
    mask = torch.ones(len(query), length, dtype=torch.bool).tril(length - len(query))
    attended = scaled_dot_product_attention(
        query.transpose(0, 1)[None], seen, held, attn_mask=mask, scale=scale, enable_gqa=True
    )
    return attended[0].transpose(0, 1)
