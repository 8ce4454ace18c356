"""Attention to a paged cache, compared with a formula in fp64 without pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import varlen
from torch.torch_version import TorchVersion

from megatron_rl.platform import flash_kernels
from megatron_rl.platform.cuda_attention import CudaAttention
from megatron_rl.platform.flash_kernels import Kernel
from megatron_rl.platform.paged_attention import GatheredAttention, KernelAttention, PagedRows, gathered_attention
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
    kernel = Kernel("one", lambda query, *_: query)
    ours, of_longer = (
        CudaAttention(None, pages=kernel).paged(replace(rows, bounds=rows.bounds + more), torch.bfloat16)
        for more in (0, 200)
    )
    assert isinstance(ours, KernelAttention) and isinstance(of_longer, KernelAttention)
    assert ours.longest == of_longer.longest == 512, "a recorded step would keep host values"
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
        attention = KernelAttention(kernel.attend, table, lengths, 1000)
        out = attention.attend(query, cache, cache)
        assert (out.shape, out.dtype, out.device) == ((3, HEADS * 64), torch.bfloat16, gpu)


def test_torchs_kernel_gets_the_arguments_that_flash_attention_2_requires(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel raises if only the queries have edges, and splits sequences unless num_splits forbids it. Fake tensors
    do not show either."""
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
    kernel.attend(query, query[None], query[None], rows.table, rows.lengths.int(), 512)
    assert (given["max_q"], given["max_k"], given["num_splits"], given["window_size"]) == (1, 512, 1, (-1, 0))
    assert given["cu_seq_q"].tolist() == [0, 1, 2, 3]
    assert given["cu_seq_k"].tolist() == [0, 512, 1024, 1536]
    for name in ("cu_seq_q", "cu_seq_k", "seqused_k", "block_table"):
        assert given[name].dtype is torch.int32, name
        assert given[name].is_contiguous()
