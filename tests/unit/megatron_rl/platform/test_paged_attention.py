"""Attention to a paged cache, compared with a formula in fp64 without pages."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from examples import examples
from flash_attn_stand_in import FLASH_ATTN, splits
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.torch_version import TorchVersion

from megatron_rl.platform import flash_kernels
from megatron_rl.platform.cuda_attention import CudaAttention
from megatron_rl.platform.flash_kernels import PagedKernel, find_paged_kernel
from megatron_rl.platform.kernel_speed import SPLIT_TOKENS, key_splits
from megatron_rl.platform.paged_attention import (
    ChunkAttention,
    GatheredAttention,
    KernelAttention,
    PagedChunks,
    PagedRows,
    gathered_attention,
)
from megatron_rl.platform.phantom import PhantomDevice
from megatron_rl.platform.sparse_attention import sparse_attention

HEADS, KV_HEADS, HEAD = 4, 2, 8


def by_formula(query: Tensor, keys: Tensor, values: Tensor, rows: PagedRows) -> Tensor:
    """[rows, heads * head_size] in fp64, row by row and head by head."""
    out = torch.empty(*query.shape, dtype=torch.float64)
    for row, length in enumerate(rows.lengths.tolist()):
        places = [(int(rows.table[row, i // rows.page_tokens]), i % rows.page_tokens) for i in range(length)]
        key, value = (torch.stack([each[page, :, place] for page, place in places]).double() for each in (keys, values))
        for head in range(HEADS):
            of_head = head // (HEADS // KV_HEADS)
            scores = key[:, of_head] @ query[row, head].double() / HEAD**0.5
            out[row, head] = scores.softmax(0) @ value[:, of_head]
    return out.flatten(1)


def pages_of(lengths: list[int], page_tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor, PagedRows]:
    """Query, keys, values, and rows with scattered pages, which all share the first one."""
    draw = torch.Generator().manual_seed(seed)
    width = -(-max(lengths) // page_tokens)
    table = torch.randperm(1 + len(lengths) * width, generator=draw)[: len(lengths) * width].view(len(lengths), width)
    if min(lengths) > page_tokens:
        table[:, 0] = table[0, 0]
    query = torch.randn(len(lengths), HEADS, HEAD, generator=draw)
    keys, values = torch.randn(2, 1 + len(lengths) * width, KV_HEADS, page_tokens, HEAD, generator=draw)
    rows = PagedRows(table.int(), torch.tensor(lengths), np.array(lengths), page_tokens, HEADS, KV_HEADS)
    return query, keys, values, rows


@pytest.mark.parametrize("attention", [gathered_attention, sparse_attention])
@examples(20)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=9),
    page_tokens=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_each_row_attends_to_its_own_tokens(attention: Any, lengths: list[int], page_tokens: int, seed: int) -> None:
    query, keys, values, rows = pages_of(lengths, page_tokens, seed)
    attention = attention(rows)
    attention.attend(*pages_of(lengths, page_tokens, seed + 1)[:3])  # another layer
    out = attention.attend(query, keys, values)
    torch.testing.assert_close(out.double(), by_formula(query, keys, values, rows), rtol=1e-5, atol=1e-5)


@pytest.mark.bits
@examples(15)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=2, max_size=12),
    page_tokens=st.sampled_from([7, 16]),
    seed=st.integers(0, 99),
)
def test_on_a_cpu_a_row_is_the_same_bit_for_bit_beside_any_others(
    lengths: list[int], page_tokens: int, seed: int
) -> None:
    query, keys, values, rows = pages_of(lengths, page_tokens, seed)
    together = sparse_attention(rows).attend(query, keys, values)
    for row in range(len(lengths)):
        one = slice(row, row + 1)
        alone = PagedRows(rows.table[one], rows.lengths[one], rows.bounds[one], page_tokens, HEADS, KV_HEADS)
        assert torch.equal(sparse_attention(alone).attend(query[one], keys, values), together[one])


def test_a_gpu_reads_pages_if_a_kernel_supports_them_and_gathers_them_otherwise() -> None:
    _, _, _, small = pages_of([5, 3], 16, 0)
    _, _, _, rows = pages_of([500, 300], 256, 0)
    kernel = PagedKernel("one", lambda query, *_: query, lambda query, *_: query)
    ours, of_longer = (
        CudaAttention(None, pages=kernel).paged(replace(rows, bounds=rows.bounds + more), torch.bfloat16)
        for more in (0, 200)
    )
    assert isinstance(ours, KernelAttention) and isinstance(of_longer, KernelAttention)
    assert ours.longest == of_longer.longest == 512, "a recorded step would keep host values"
    chunks = PagedChunks(rows.table.numpy(), np.array([1, 2]), np.array([500, 300]), 256)
    gpu = CudaAttention(None, pages=kernel)
    assert isinstance(gpu.chunks(chunks, torch.device("cpu"), torch.bfloat16), ChunkAttention)
    assert gpu.chunks(chunks, torch.device("cpu"), torch.float32) is None
    assert gpu.chunks(replace(chunks, page_tokens=16), torch.device("cpu"), torch.bfloat16) is None
    for attention, of, dtype in (
        (CudaAttention(None, pages=kernel), rows, torch.float32),
        (CudaAttention(None, pages=kernel), small, torch.bfloat16),
        (CudaAttention(None), rows, torch.bfloat16),
    ):
        assert isinstance(attention.paged(of, dtype), GatheredAttention)


def test_torchs_kernel_accepts_its_arguments() -> None:
    """Checks signature, dtypes and devices on fake GPU tensors."""
    from megatron_rl.platform.flash_kernels import _paged_torch

    kernel = _paged_torch()
    if kernel is None:
        pytest.skip("torch's kernel reads pages from 2.13 on")
    gpu = torch.device("cuda", 0)
    with PhantomDevice(gpu):
        cache = torch.zeros(9, 256, KV_HEADS, 64, dtype=torch.bfloat16, device=gpu)
        table, lengths = torch.zeros(3, 4, dtype=torch.int32, device=gpu), torch.ones(3, dtype=torch.int32, device=gpu)
        query = torch.zeros(3, HEADS, 64, dtype=torch.bfloat16, device=gpu)
        chunks = PagedChunks(np.zeros((2, 4), np.int32), np.array([1, 2]), np.array([1000, 7]), 256)
        for attention in (
            KernelAttention(kernel.attend, table, lengths, 1000, 2),
            ChunkAttention.of(chunks, kernel.attend_chunks, gpu),
        ):
            out = attention.attend(query, cache, cache)
            assert (out.shape, out.dtype, out.device) == ((3, HEADS * 64), torch.bfloat16, gpu)


def test_torchs_kernel_gets_the_arguments_that_flash_attention_2_requires(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel raises if only the queries have edges. It chooses splits by the batch unless their number is given.
    Only without a window does it read the keys of a group of query heads once, and split them. Fake tensors show none
    of this."""
    from torch.nn.attention import varlen  # loads torch's compiler

    given: dict[str, Any] = {}

    def varlen_attn(  # with the real one's parameters
        query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int,
        *, window_size: tuple[int, int], enable_gqa: bool, seqused_k: Tensor, block_table: Tensor, num_splits: int,
    ) -> Tensor:  # fmt: skip
        given.update(locals())
        return query

    _, _, _, rows = pages_of([500, 300, 7], 256, 0)
    for version, there in (("2.12.1", False), ("2.13.0a0", False), ("2.13.0", True), ("2.15.0", True)):
        monkeypatch.setattr(torch, "__version__", TorchVersion(version))
        monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
        kernel = flash_kernels._paged_torch()
        assert (kernel is not None) == there, version
    assert kernel is not None
    query = torch.zeros(3, HEADS, HEAD)
    cache = torch.zeros(9, 256, KV_HEADS, HEAD)
    kernel.attend(query, cache, cache, rows.table, rows.lengths.int(), 512, 4)
    assert (given["max_q"], given["max_k"], given["num_splits"], given["window_size"]) == (1, 512, 4, (-1, -1))
    assert given["cu_seq_q"].tolist() == [0, 1, 2, 3]
    assert given["cu_seq_k"].tolist() == [0, 512, 1024, 1536]
    for name in ("cu_seq_q", "cu_seq_k", "seqused_k", "block_table"):
        assert given[name].dtype is torch.int32, name
        assert given[name].is_contiguous()
    ungrouped = torch.zeros(9, 256, HEADS, HEAD)
    kernel.attend(query, ungrouped, ungrouped, rows.table, rows.lengths.int(), 512, 4)
    assert given["num_splits"] == 1
    chunks = PagedChunks(rows.table.numpy(), np.array([1, 1, 1]), np.array([500, 300, 7]), 256)
    ChunkAttention.of(chunks, kernel.attend_chunks, torch.device("cpu")).attend(query, cache, cache)
    assert (given["max_k"], given["num_splits"], given["window_size"]) == (500, 1, (-1, 0))
    assert given["seqused_k"].tolist() == [500, 300, 7] and given["seqused_k"].dtype is torch.int32
    assert given["cu_seq_k"].tolist() == [0, 500, 800, 807]
    assert given["max_q"] > 1, "the kernel would choose splits by the rows of the batch"


def test_the_number_of_splits_follows_from_the_longest_sequence_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from the rows, their number or their lengths, so that the same row is split alike beside any others."""
    for name, module in FLASH_ATTN.items():
        monkeypatch.setitem(sys.modules, name, module)
    attention = CudaAttention(None, pages=find_paged_kernel())
    longest, keys = 5 * SPLIT_TOKENS, torch.zeros(40, 256, KV_HEADS, HEAD)
    for lengths in ([1], [300, 200], [2 * SPLIT_TOKENS] * 9):
        table = torch.zeros(len(lengths), longest // 256, dtype=torch.int32)
        rows = PagedRows(table, torch.tensor(lengths), np.array(lengths), 256, HEADS, KV_HEADS)
        splits.clear()
        attention.paged(rows, torch.bfloat16).attend(torch.zeros(len(lengths), HEADS, HEAD), keys, keys)
        assert splits == [5]
    assert [key_splits(longest) for longest in (1, SPLIT_TOKENS, SPLIT_TOKENS + 1, 10**6)] == [1, 1, 2, 128]


@examples(20)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=6),
    page_tokens=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_chunks_attend_to_what_is_before_them_in_pages(
    lengths: list[tuple[int, int]], page_tokens: int, seed: int
) -> None:
    """Through flash-attn's arguments. Each chunk equals single rows that are one token longer each."""
    with mock.patch.dict(sys.modules, FLASH_ATTN):
        kernel = find_paged_kernel()
    assert kernel is not None
    new, before = (np.array(each) for each in zip(*lengths, strict=True))
    single = [start + 1 + i for count, start in lengths for i in range(count)]
    _, keys, values, of_sequences = pages_of([sum(each) for each in lengths], page_tokens, seed)
    query = torch.randn(len(single), HEADS, HEAD, generator=torch.Generator().manual_seed(seed))
    table = of_sequences.table
    every = replace(of_sequences, table=table.repeat_interleave(torch.from_numpy(new), 0), lengths=torch.tensor(single))
    chunks = PagedChunks(table.numpy(), new, new + before, page_tokens)
    attention = ChunkAttention.of(chunks, kernel.attend_chunks, torch.device("cpu"))
    out = attention.attend(query, keys.transpose(1, 2), values.transpose(1, 2))
    torch.testing.assert_close(out.double(), by_formula(query, keys, values, every), rtol=1e-5, atol=1e-5)
