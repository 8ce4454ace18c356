"""flash-attn on a CPU: its functions with their signatures in 2.7.4 and 2.8.3, computed by their definition."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    assert causal
    queries, keys = _lengths(cu_seqlens_q), _lengths(cu_seqlens_k)
    assert max(queries) <= max_seqlen_q and max(keys) <= max_seqlen_k
    out, first, first_key = torch.zeros_like(q), 0, 0
    log_sums = q.new_zeros(q.shape[1], len(q), dtype=torch.float32)
    for row, (count, length) in enumerate(zip(queries, keys, strict=True)):
        if block_table is None:
            seen, held = (each[first_key : first_key + length] for each in (k, v))
        else:
            seen, held = (gathered(each, block_table[row], length) for each in (k, v))
        new = slice(first, first + count)
        out[new], log_sums[:, new] = attend(q[new], seen, held, softmax_scale, window_size)
        first, first_key = first + count, first_key + length
    return (out, log_sums, None) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Counts calls by their number of splits in `splits`: 0 would let the kernel choose by the rows of the batch."""
    assert causal and cache_seqlens is not None and block_table is not None
    assert cache_seqlens.dtype is block_table.dtype is torch.int32
    splits.append(num_splits)
    out = torch.zeros_like(q)
    log_sums = q.new_zeros(len(q), q.shape[2], q.shape[1], dtype=torch.float32)
    for row, length in enumerate(cache_seqlens.tolist()):
        if length:
            seen, held = (gathered(each, block_table[row], length) for each in (k_cache, v_cache))
            out[row], log_sums[row] = attend(q[row], seen, held, softmax_scale, window_size)
    return (out, log_sums) if return_softmax_lse else out


splits: list[int] = []
"""`num_splits` of each call of `flash_attn_with_kvcache`."""


def gathered(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """[pages, slots, groups, size] -> [length, groups, size] of one sequence."""
    return cache[pages[: -(-length // cache.shape[1])].long()].flatten(0, 1)[:length]


def attend(
    query: Tensor, keys: Tensor, values: Tensor, scale: float | None, window: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Attention of the last queries of a sequence, [queries, heads, size], to all of it, [length, groups, size], and
    the logarithms of sums, [heads, queries]."""
    assert window[1] in (0, -1)
    last = torch.arange(len(keys) - len(query), len(keys))[:, None]
    places = torch.arange(len(keys))
    seen = (places <= last) & ((window[0] < 0) | (places >= last - window[0]))
    keys, values = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values), scores.logsumexp(-1)


def _lengths(edges: Tensor) -> list[int]:
    assert edges.dtype is torch.int32 and edges.is_contiguous()
    return [int(length) for length in edges.diff()]


def package(name: str, **names: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(names, __version__="1.2.3", __path__=[])
    return module


FLASH_ATTN = {
    "flash_attn": package(
        "flash_attn",
        flash_attn_varlen_func=flash_attn_varlen_func,
        flash_attn_with_kvcache=flash_attn_with_kvcache,
    )
}
"""Modules by name, for sys.modules."""
