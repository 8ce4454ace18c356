"""Attention to a paged cache in Triton. Imported only where Triton is installed, which CUDA builds of torch require.

The online softmax of FlashAttention-2 (arXiv 2307.08691). The query heads that share a key/value head are rows of one
product, so that keys and values are read once for all of them. In decoding, several programs attend to parts of a row's
keys, as in Flash-Decoding (https://pytorch.org/blog/flash-decoding), and a second kernel joins their results.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_rl.model.platform.attention import AttentionForm

SMALLEST_SIDE = 16
"""Least rows and columns of a product on tensor cores."""
CHUNK_ROWS = 64
"""Rows of queries that one program attends with in prefills."""
BLOCK_BYTES = 2**14
"""Bytes of keys, and of values, that a program reads at a time at most: 64 tokens of a head of 128 in bf16."""
MOST_KEYS = 128
"""Tokens that a program reads at a time at most: the scores of more do not fit into registers."""
SINGLE_STAGES = 5
"""Stages of the loop over the keys in decoding: two blocks are on their way while a third is attended to. With Triton's
default of three it is one."""
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["table_width"])  # it differs between prefills, which then share one kernel
def _attend(
    query, keys, values, table, lengths, query_edges, key_edges, sinks, out, parts, weights,
    scale, table_width, kv_heads, split_tokens,
    SINGLE: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, GROUP: tl.constexpr,
    SIZE: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rows of the products are pairs of a new token and a query head of the group: all heads of a token, then the next
    token. SINGLE: each sequence has one new token, and programs divide its keys instead of its new tokens. WINDOW:
    tokens that a token sees, itself included; 0 for all."""
    part, group, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if SINGLE:
        first, new, begin = sequence, 1, 0
        length = tl.load(lengths + sequence)
        start = part * split_tokens
        stop = tl.minimum(length, start + split_tokens)
    else:
        first = tl.load(query_edges + sequence).to(tl.int64)
        new = (tl.load(query_edges + sequence + 1) - first).to(tl.int32)
        begin = part * (ROWS // GROUP)
        if begin >= new:
            return
        length = tl.load(key_edges + sequence + 1) - tl.load(key_edges + sequence)
        start = 0
        stop = length - new + tl.minimum(begin + ROWS // GROUP, new)
    if WINDOW:  # skip blocks of keys that even the first of the new tokens does not see
        start = tl.maximum(start, tl.maximum(length - new + begin + 1 - WINDOW, 0) // KEYS * KEYS)
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    token = begin + row // GROUP
    inside, last = (token < new) & (row < ROWS // GROUP * GROUP), length - new + token  # last key that it sees, its own
    head = (first + token) * kv_heads * GROUP + group * GROUP + row % GROUP  # of all heads of all new tokens
    of_query = inside[:, None] & (column < SIZE)[None, :]
    q = tl.load(query + head[:, None] * SIZE + column[None, :], mask=of_query, other=0.0)

    most, total = _first_sums(sinks + group * GROUP + row % GROUP, (part == 0) | (SPLITS == 1), SINKS, ROWS)
    attended = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in range(start, stop, KEYS):
        at = block + tl.arange(0, KEYS)
        there = at < stop
        page = tl.load(table + sequence * table_width + at // PAGE, mask=there, other=0).to(tl.int64)
        place = ((page * PAGE + at % PAGE) * kv_heads + group) * SIZE
        of_key = there[:, None] & (column < SIZE)[None, :]
        k = tl.load(keys + place[:, None] + column[None, :], mask=of_key, other=0.0)
        v = tl.load(values + place[:, None] + column[None, :], mask=of_key, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(there[None, :] & _sees(last[:, None], at[None, :], WINDOW), scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        # Each row of a token sees the first key of its first block, so that `higher` is a number, except in a window.
        shift = tl.where(higher == float("-inf"), 0.0, higher) if WINDOW else higher
        shrink, weight = tl.exp2(most - shift), tl.exp2(scores - shift[:, None])
        total = total * shrink + tl.sum(weight, 1)
        attended = tl.dot(weight.to(v.dtype), v, attended * shrink[:, None], input_precision="ieee")
        most = higher
    total = tl.where(total == 0.0, 1.0, total)  # of a split without keys
    attended = attended / total[:, None]
    if SPLITS == 1:
        tl.store(out + head[:, None] * SIZE + column[None, :], attended.to(out.dtype.element_ty), mask=of_query)
    else:
        place = head * SPLITS + part
        tl.store(parts + place[:, None] * SIZE + column[None, :], attended, mask=of_query)
        tl.store(weights + place, most + tl.log2(total), mask=inside)


@triton.jit
def _sees(token, key, WINDOW: tl.constexpr):
    seen = key <= token
    if WINDOW:
        seen = seen & (key > token - WINDOW)
    return seen


@triton.jit
def _first_sums(sinks, holds, SINKS: tl.constexpr, ROWS: tl.constexpr):
    """Maximum and sum of the softmax of each row before the first key: those of its sink in the split that holds it."""
    if not SINKS:
        return tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    holds = (tl.arange(0, ROWS) >= 0) & holds
    most = tl.load(sinks, mask=holds, other=float("-inf")).to(tl.float32) * LOG2_E
    return most, tl.where(holds, 1.0, 0.0)


@triton.jit
def _join(parts, weights, out, SPLITS: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Average the results of the splits by the sums of their softmax, given as logarithms to base 2."""
    head = tl.program_id(0).to(tl.int64)
    split, column = tl.arange(0, PARTS), tl.arange(0, COLUMNS)
    weight = tl.load(weights + head * SPLITS + split, mask=split < SPLITS, other=float("-inf"))
    weight = tl.exp2(weight - tl.max(weight, 0))
    weight /= tl.sum(weight, 0)
    place = (head * SPLITS + split)[:, None] * SIZE + column[None, :]
    inside = (column < SIZE)[None, :]
    part = tl.load(parts + place, mask=inside & (weight > 0.0)[:, None], other=0.0)
    joined = tl.sum(part * weight[:, None], 0)
    tl.store(out + head * SIZE + column, joined.to(out.dtype.element_ty), mask=column < SIZE)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    longest: int,
    splits: int,
    form: AttentionForm,
) -> Tensor:
    """`PagedAttend` of flash_kernels.py."""
    query = query.contiguous()  # queries of layers that also train are slices of a larger tensor
    rows, heads, size = query.shape
    kv_heads = keys.shape[2]
    out = torch.empty_like(query)
    parts, weights = out, lengths  # not used
    if splits > 1:
        parts = query.new_empty(rows, heads, splits, size, dtype=torch.float32)
        weights = query.new_empty(rows, heads, splits, dtype=torch.float32)
    of_tile = _tile(keys, heads // kv_heads, SMALLEST_SIDE)
    split_tokens = triton.cdiv(triton.cdiv(longest, splits), of_tile["KEYS"]) * of_tile["KEYS"]
    _attend[(splits, kv_heads, rows)](
        *_checked(query, keys, values, table), lengths, lengths, lengths, _sinks(form, query), out, parts, weights,
        LOG2_E.value * form.factor(size), table.shape[1], kv_heads, split_tokens,
        SINGLE=True, SPLITS=splits, num_stages=SINGLE_STAGES, **_constants(form), **of_tile,
    )  # fmt: skip
    if splits > 1:
        size_of = {"SIZE": size, "COLUMNS": of_tile["COLUMNS"]}
        _join[(rows * heads,)](parts, weights, out, SPLITS=splits, PARTS=triton.next_power_of_2(splits), **size_of)
    return out


def attend_chunks(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    query_edges: Tensor,
    key_edges: Tensor,
    most: tuple[int, int],
    form: AttentionForm,
) -> Tensor:
    """`ChunkAttend` of flash_kernels.py."""
    query = query.contiguous()  # as in `attend`
    heads, kv_heads = query.shape[1], keys.shape[2]
    out = torch.empty_like(query)
    # Without tensor cores, whose products in fp32 are too coarse, more rows do not fit into registers.
    of_tile = _tile(keys, heads // kv_heads, SMALLEST_SIDE if query.dtype is torch.float32 else CHUNK_ROWS)
    blocks = triton.cdiv(most[0], of_tile["ROWS"] // of_tile["GROUP"])
    _attend[(blocks, kv_heads, len(table))](
        *_checked(query, keys, values, table), key_edges, query_edges, key_edges, _sinks(form, query), out, out,
        key_edges, LOG2_E.value * form.factor(query.shape[2]), table.shape[1], kv_heads, 0,
        SINGLE=False, SPLITS=1, **_constants(form), **of_tile,
    )  # fmt: skip
    return out


def _sinks(form: AttentionForm, unused: Tensor) -> Tensor:
    return unused if form.sinks is None else form.sinks


def _constants(form: AttentionForm) -> dict[str, Any]:
    return {"WINDOW": form.window or 0, "SINKS": form.sinks is not None}


def _checked(query: Tensor, keys: Tensor, values: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert all(each.is_contiguous() for each in (query, keys, values, table))
    assert query.dtype == keys.dtype == values.dtype
    return query, keys, values, table


def _tile(keys: Tensor, group: int, rows: int) -> dict[str, int]:
    """Sizes that a program of `_attend` is compiled for. keys: see `PagedAttend`; rows: of queries, at least."""
    page, size = keys.shape[1], keys.shape[3]
    columns = max(SMALLEST_SIDE, triton.next_power_of_2(size))
    return {
        "GROUP": group,
        "SIZE": size,
        "PAGE": page,
        "ROWS": max(rows, triton.next_power_of_2(group)),
        "KEYS": min(MOST_KEYS, max(SMALLEST_SIDE, BLOCK_BYTES // (columns * keys.itemsize))),
        "COLUMNS": columns,
    }
