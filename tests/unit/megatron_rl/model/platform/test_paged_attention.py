"""Attention to a paged cache, compared with a formula in fp64 without pages."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from unittest import mock

import numpy as np
import pytest
import torch
from attention_formula import forms
from examples import examples
from flash_attn_stand_in import FLASH_ATTN, splits
from hypothesis import given
from hypothesis import strategies as st
from paged_cases import by_formula, pages_of

from megatron_rl.model.platform.attention import AttentionForm
from megatron_rl.model.platform.cuda_attention import CudaAttention
from megatron_rl.model.platform.device import UnsupportedPlatform
from megatron_rl.model.platform.flash_kernels import PagedKernel, find_paged_kernels
from megatron_rl.model.platform.paged_attention import (
    ChunkAttention,
    KernelAttention,
    PagedChunks,
    PagedRows,
)
from megatron_rl.model.platform.sparse_attention import sparse_attention
from megatron_rl.recipe.kernel_speed import SPLIT_TOKENS, key_splits

HEADS, KV_HEADS, HEAD = 4, 2, 8


@examples(20)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=9),
    page_tokens=st.integers(1, 20),
    seed=st.integers(0, 99),
    form=forms(HEADS),
)
def test_each_row_attends_to_its_own_tokens(
    lengths: list[int], page_tokens: int, seed: int, form: AttentionForm
) -> None:
    query, keys, values, rows = pages_of(lengths, page_tokens, seed)
    attention = sparse_attention(rows)
    attention.attend(*pages_of(lengths, page_tokens, seed + 1)[:3])  # another layer
    out = attention.attend(query, keys, values, form)
    torch.testing.assert_close(out.double(), by_formula(query, keys, values, rows, form), rtol=1e-5, atol=1e-5)


@pytest.mark.bits
@examples(15)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=2, max_size=12),
    page_tokens=st.sampled_from([7, 16]),
    seed=st.integers(0, 99),
    form=forms(HEADS),
)
def test_on_a_cpu_a_row_is_the_same_bit_for_bit_beside_any_others(
    lengths: list[int], page_tokens: int, seed: int, form: AttentionForm
) -> None:
    query, keys, values, rows = pages_of(lengths, page_tokens, seed)
    together = sparse_attention(rows).attend(query, keys, values, form)
    for row in range(len(lengths)):
        one = slice(row, row + 1)
        alone = PagedRows(rows.table[one], rows.lengths[one], rows.bounds[one], page_tokens, HEADS, KV_HEADS)
        assert torch.equal(sparse_attention(alone).attend(query[one], keys, values, form), together[one])


def test_a_gpu_reads_pages_by_a_kernel_that_supports_them() -> None:
    _, _, _, rows = pages_of([500, 300], 256, 0)
    kernel = PagedKernel("one", lambda query, *_: query, lambda query, *_: query, fp32=False, page_multiple=256)
    gpu = CudaAttention(None, pages=[kernel])
    ours, of_longer = (gpu.paged(replace(rows, bounds=rows.bounds + more), torch.bfloat16) for more in (0, 200))
    assert isinstance(ours, KernelAttention) and isinstance(of_longer, KernelAttention)
    assert ours.longest == of_longer.longest == 512, "a recorded step would keep host values"
    chunks = PagedChunks(rows.table.numpy(), np.array([1, 2]), np.array([500, 300]), 256)
    assert isinstance(gpu.chunks(chunks, torch.device("cpu"), torch.bfloat16), ChunkAttention)
    for page_tokens, dtype in ((256, torch.float32), (16, torch.bfloat16)):
        with pytest.raises(UnsupportedPlatform, match="Triton, which every build of torch for CUDA brings"):
            gpu.page_kernel(dtype, page_tokens)


def test_kernels_are_flash_attns_and_for_what_those_do_not_support_tritons() -> None:
    triton = pytest.importorskip("triton")
    with mock.patch.dict(sys.modules, FLASH_ATTN):
        attention = CudaAttention(None, pages=find_paged_kernels())
    found = {of: attention.page_kernel(*of) for of in product((torch.bfloat16, torch.float32), (256, 16))}
    names = {of: kernel.name for of, kernel in found.items()}
    ours = f"Triton {triton.__version__}"
    assert names == dict.fromkeys(found, ours) | {(torch.bfloat16, 256): "flash-attn 1.2.3"}
    assert f"pages by flash-attn 1.2.3 or {ours}" in attention.description
    with mock.patch.dict(sys.modules, {"flash_attn": None, "triton": None}):
        assert find_paged_kernels() == ()


def test_the_number_of_splits_follows_from_the_longest_sequence_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from the rows, their number or their lengths, so that the same row is split alike beside any others."""
    for name, module in FLASH_ATTN.items():
        monkeypatch.setitem(sys.modules, name, module)
    attention = CudaAttention(None, pages=find_paged_kernels())
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
    form=forms(HEADS),
)
def test_flash_attns_arguments_say_what_rows_and_chunks_see(
    lengths: list[tuple[int, int]], page_tokens: int, seed: int, form: AttentionForm
) -> None:
    """Each chunk equals single rows that are one token longer each."""
    with mock.patch.dict(sys.modules, FLASH_ATTN):
        kernel = find_paged_kernels()[0]
    new, before = (np.array(each) for each in zip(*lengths, strict=True))
    single = [start + 1 + i for count, start in lengths for i in range(count)]
    _, keys, values, of_sequences = pages_of([sum(each) for each in lengths], page_tokens, seed)
    query = torch.randn(len(single), HEADS, HEAD, generator=torch.Generator().manual_seed(seed))
    table = of_sequences.table
    every = replace(of_sequences, table=table.repeat_interleave(torch.from_numpy(new), 0), lengths=torch.tensor(single))
    chunks = PagedChunks(table.numpy(), new, new + before, page_tokens)
    attention = ChunkAttention.of(chunks, kernel.attend_chunks, torch.device("cpu"))
    expected = by_formula(query, keys, values, every, form)
    rows = KernelAttention(kernel.attend, every.table, every.lengths.int(), max(single), 1)
    for paged in (attention, rows):
        out = paged.attend(query, keys.transpose(1, 2), values.transpose(1, 2), form)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
