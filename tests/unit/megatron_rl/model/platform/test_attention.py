"""Every sequence attends to itself alone, causally, whatever is packed with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_formula import by_definition, forms, seen_in_trees
from core_helpers import CPU, tiny_policy
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.algorithms.packing import pack
from megatron_rl.model.platform import dense_attention
from megatron_rl.model.platform.attention import PLAIN, AttentionForm, Layout, PackedSequences, depths, whole_sequences
from megatron_rl.model.platform.dense_attention import LONGEST_MASKED_TREE, branches, bucket_length, dense_layout
from megatron_rl.model.platform.phantom import ACCELERATOR, PhantomKernels

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=8)
HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 8


def random_qkv(tokens: int, value_size: int = HEAD_SIZE) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (HEADS, HEAD_SIZE), (KV_HEADS, HEAD_SIZE), (KV_HEADS, value_size)
    return [torch.randn(tokens, *shape, generator=generator, requires_grad=True) for shape in shapes]


def compare(layout: Layout, packed: PackedSequences, form: AttentionForm = PLAIN, value_size: int = HEAD_SIZE) -> None:
    """Compare results and gradients, those of the sinks included, with the formula."""
    inputs = random_qkv(len(packed.subtree_ends), value_size)
    if form.sinks is not None:
        form.sinks.requires_grad_()
    expected = by_definition(*inputs, seen_in_trees(packed), form)
    found = layout.attend(1, *inputs, form)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    inputs += [] if form.sinks is None else [form.sinks]
    of_result = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    ours, theirs = (torch.autograd.grad(each, inputs, of_result.to(each.dtype)) for each in (found, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@examples(30)
@given(LENGTHS, forms(HEADS))
def test_every_sequence_attends_as_if_alone(lengths: list[int], form: AttentionForm) -> None:
    packed = whole_sequences(lengths)
    compare(dense_layout(packed, CPU), packed, form)


FEW_TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=20)
"""Tokens of answers that often share prefixes."""


@examples(30)
@given(
    prompt=st.lists(st.integers(3, 9), min_size=1, max_size=20),
    answers=st.lists(FEW_TOKENS, min_size=1, max_size=6),
    longest_masked_tree=st.sampled_from([0, LONGEST_MASKED_TREE]),
    form=forms(HEADS),
    value_size=st.sampled_from([HEAD_SIZE, 3]),
)
def test_shared_tokens_serve_every_branch(
    prompt: list[int], answers: list[list[int]], longest_masked_tree: int, form: AttentionForm, value_size: int
) -> None:
    """Each token sees the tokens it continues as if its sequence stood alone, under a mask or branch by branch."""
    rows = [prompt + answer for answer in answers]
    (micro,) = pack(rows, [[False] * len(prompt) + [True] * len(answer) for answer in answers], range(len(rows)), 10**6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense_attention, "LONGEST_MASKED_TREE", longest_masked_tree)
        compare(dense_layout(micro, CPU), micro, form, value_size)
    assert depths(micro.subtree_ends.numpy()).tolist() == micro.positions.tolist()
    found = branches(micro.subtree_ends, 0, len(micro.tokens))
    for places in found:
        assert micro.positions[places].tolist() == list(range(len(places)))
    prefixes = {tuple(micro.tokens[places].tolist()) for places in found}
    assert all(any(prefix[: len(row) - 1] == tuple(row[:-1]) for prefix in prefixes) for row in rows)


def test_gradients_of_shared_tokens_are_summed_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of 64 branches of a prompt, of two lengths, in bf16 are summed exactly and rounded once."""
    prompt = [3] * 40
    answers = [[i % 3, i // 3 % 3, i // 9 % 3, *([1] * 60 if i % 2 else [5, 5])] for i in range(64)]
    rows = [prompt + answer for answer in answers]
    (micro,) = pack(rows, [[False] * 40 + [True] * len(answer) for answer in answers], range(len(rows)), 10**6)
    monkeypatch.setattr(dense_attention, "LONGEST_MASKED_TREE", 0)
    layout = dense_layout(micro, CPU)
    assert len(layout.buckets) > 1
    tokens = torch.ones(len(micro.tokens), KV_HEADS, HEAD_SIZE, dtype=torch.bfloat16, requires_grad=True)
    of_places = [
        torch.randn(bucket.rows.shape[0], KV_HEADS, HEAD_SIZE, generator=torch.Generator().manual_seed(i)).bfloat16()
        for i, bucket in enumerate(layout.buckets)
    ]
    (gradient,) = torch.autograd.grad(layout._gathered(tokens), [tokens], of_places)
    exact = torch.zeros(len(micro.tokens), KV_HEADS, HEAD_SIZE, dtype=torch.float64)
    for bucket, each in zip(layout.buckets, of_places, strict=True):
        exact.index_add_(0, bucket.rows, each.double())
    assert gradient.dtype is torch.bfloat16
    torch.testing.assert_close(gradient.double(), exact, rtol=2**-8, atol=1e-5)


def test_a_gpu_sums_the_gradients_of_a_repeated_token_in_fp32() -> None:
    """The last token of a prompt predicts the first token of 64 answers. Summed one by one in bf16, as the GPU itself
    would, the error would be twice that of rounding once."""
    rows = torch.tensor([0] + [2] * 64)
    of_rows = torch.randn(len(rows), 1, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    tokens = torch.ones(4, 1, 256, dtype=torch.bfloat16, requires_grad=True)
    gathered = PhantomKernels(ACCELERATOR).gather(tokens, rows)
    assert torch.equal(gathered, tokens[rows])
    assert gathered.grad_fn is not None
    assert "IndexSelect" not in gathered.grad_fn.name()
    (gradient,) = torch.autograd.grad(gathered, [tokens], of_rows)
    exact = torch.zeros(4, 1, 256, dtype=torch.float64).index_add_(0, rows, of_rows.double())
    torch.testing.assert_close(gradient.double(), exact, rtol=2**-8, atol=1e-5)
    one_by_one = sum(of_rows[1:].unbind(), torch.zeros(1, 256, dtype=torch.bfloat16))
    assert (one_by_one - exact[2]).norm() > 2 * 2**-8 * exact[2].norm()


def test_the_policy_gathers_selected_tokens_by_the_kernels(
    platform: Any, groups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tiny_policy(platform)
    gathered = []

    def gather(tokens: Tensor, rows: Tensor) -> Tensor:
        gathered.append(rows.tolist())
        return tokens[rows]

    monkeypatch.setattr(policy.kernels, "gather", gather, raising=False)
    tokens = torch.tensor([1, 2, 3])
    policy(tokens, torch.arange(3), policy.layout(whole_sequences([3])), torch.tensor([0, 0, 2]))
    assert gathered == [[0, 0, 2]]


@given(st.integers(1, 100_000))
def test_less_than_a_fifth_of_a_bucket_is_padding(length: int) -> None:
    padded = bucket_length(length)
    assert 0 <= padded - length < max(1, padded / 5)
    assert bucket_length(padded) == padded


def test_there_are_few_bucket_lengths() -> None:
    assert len({bucket_length(length) for length in range(1, 4097)}) < 64
