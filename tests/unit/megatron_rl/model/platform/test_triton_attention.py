"""Triton's attention to pages agrees with a formula in fp64.

It runs in Triton's interpreter, on a CPU, whose products of bf16 are wrong: fp16 takes its place."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attention_formula import forms
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from paged_cases import Heads, by_formula, pages_of
from torch import Tensor

from megatron_rl.model.platform.attention import PLAIN, AttentionForm
from megatron_rl.model.platform.flash_kernels import PagedKernel, find_paged_kernels
from megatron_rl.model.platform.paged_attention import ChunkAttention, KernelAttention, PagedChunks, PagedRows

pytest.importorskip("triton")

HEADS = st.sampled_from([Heads(4, 2, 8), Heads(5, 1, 40), Heads(3, 3, 16), Heads(20, 1, 64)])
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3}


def kernels() -> PagedKernel:
    return find_paged_kernels()[-1]


def written(*pages: Tensor) -> tuple[Tensor, ...]:
    """Keys and values as a cache stores them that is not gathered."""
    return tuple(each.transpose(1, 2).contiguous() for each in pages)


def decoded(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: PagedRows,
    splits: int,
    longest: int = 0,
    form: AttentionForm = PLAIN,
) -> Tensor:
    longest = longest or rows.table.shape[1] * rows.page_tokens
    attention = KernelAttention(kernels().attend, rows.table, rows.lengths.int(), longest, splits)
    return attention.attend(query, *written(keys, values), form)


@pytest.mark.parametrize("dtype", TOLERANCES)
@examples(5)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    page_tokens=st.integers(1, 70),
    splits=st.integers(1, 6),
    heads=HEADS,
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_each_row_attends_to_its_own_tokens(
    dtype: torch.dtype, lengths: list[int], page_tokens: int, splits: int, heads: Heads, seed: int, data: Any
) -> None:
    *tensors, rows = pages_of(lengths, page_tokens, seed, heads)
    query, keys, values = (each.to(dtype) for each in tensors)
    form = data.draw(forms(heads.queries))
    attended = decoded(query, keys, values, rows, splits, form=form)
    assert attended.dtype is dtype
    expected = by_formula(query, keys, values, rows, form)
    torch.testing.assert_close(attended.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_a_row_is_the_same_bit_for_bit_beside_any_others() -> None:
    """The borders of the splits follow from the longest sequence that the engine allows."""
    query, keys, values, rows = pages_of([300, 1, 130, 129], 16, 0)
    together = decoded(query, keys, values, rows, 3, 320)
    for row in range(len(query)):
        one = slice(row, row + 1)
        alone = replace(rows, table=rows.table[one], lengths=rows.lengths[one])
        assert torch.equal(decoded(query[one], keys, values, alone, 3, 320), together[one])


@pytest.mark.parametrize("dtype", TOLERANCES)
@examples(5)
@given(
    sequences=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 150)), min_size=1, max_size=3),
    page_tokens=st.integers(1, 70),
    heads=HEADS,
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_chunks_attend_to_what_is_before_them(
    dtype: torch.dtype, sequences: list[tuple[int, int]], page_tokens: int, heads: Heads, seed: int, data: Any
) -> None:
    """Each chunk equals single rows that are one token longer each."""
    new, before = (np.array(each) for each in zip(*sequences, strict=True))
    _, keys, values, rows = pages_of((new + before).tolist(), page_tokens, seed, heads)
    lengths = torch.tensor([start + 1 + i for count, start in sequences for i in range(count)])
    of_tokens = replace(rows, table=rows.table.repeat_interleave(torch.from_numpy(new), 0), lengths=lengths)
    query = torch.randn(len(lengths), heads.queries, heads.size, generator=torch.Generator().manual_seed(seed))
    query, keys, values = (each.to(dtype) for each in (query, keys, values))
    chunks = PagedChunks(rows.table.numpy(), new, new + before, page_tokens)
    attention = ChunkAttention.of(chunks, kernels().attend_chunks, torch.device("cpu"))
    form = data.draw(forms(heads.queries))
    attended = attention.attend(query, *written(keys, values), form).double()
    expected = by_formula(query, keys, values, of_tokens, form)
    torch.testing.assert_close(attended, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_queries_may_be_a_slice_of_a_larger_tensor() -> None:
    """Queries of layers that also train are, as for models with experts or adapters."""
    query, keys, values, rows = pages_of([5, 20, 9], 16, 0)
    size = query.shape[2]
    wide = torch.cat((query, torch.full_like(query, torch.nan)), dim=2)
    assert torch.equal(decoded(wide[..., :size], keys, values, rows, 2), decoded(query, keys, values, rows, 2))
    chunks = PagedChunks(rows.table.numpy(), np.ones(3, dtype=np.int64), rows.lengths.numpy(), 16)
    attention = ChunkAttention.of(chunks, kernels().attend_chunks, torch.device("cpu"))
    sliced, whole = (attention.attend(each, *written(keys, values)) for each in (wide[..., :size], query))
    assert torch.equal(sliced, whole)


def test_prefills_of_all_lengths_have_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles another kernel where a number is 1 or a multiple of 16, and the engine waits for it."""
    from megatron_rl.model.platform import triton_attention

    kernel: Any = triton_attention._attend
    kinds = set()

    def launch(*given: Any, **_: Any) -> None:
        numbers = {name: each for name, each in zip(kernel.arg_names, given, strict=False) if isinstance(each, int)}
        seen = [each for name, each in numbers.items() if name not in kernel.kwargs["do_not_specialize"]]
        kinds.add(tuple((each == 1, each % 16 == 0) for each in seen))

    monkeypatch.setattr(triton_attention, "_attend", defaultdict(lambda: launch))  # by grid
    for length in (1, 16, 17):
        query, keys, values, rows = pages_of([length], 1, 0)
        chunks = PagedChunks(rows.table.numpy(), np.array([1]), np.array([length]), 1)
        ChunkAttention.of(chunks, kernels().attend_chunks, torch.device("cpu")).attend(query, *written(keys, values))
    assert len(kinds) == 1
