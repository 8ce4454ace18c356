"""A part of the packed tokens attends as it does among all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_formula import by_definition, forms, seen_in_trees
from core_helpers import CPU
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.algorithms.packing import pack
from megatron_rl.model.platform import part_attention
from megatron_rl.model.platform.attention import AttentionForm, PackedSequences
from megatron_rl.model.platform.dense_attention import LONGEST_MASKED_TREE
from megatron_rl.model.platform.part_attention import part_layout, query_blocks

HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 8
TREES = st.lists(
    st.tuples(
        st.lists(st.integers(3, 9), min_size=1, max_size=12),
        st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=16), min_size=1, max_size=5),
    ),
    min_size=1,
    max_size=3,
)


def qkv(tokens: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(tokens, heads, HEAD_SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def trees(drawn: Any) -> PackedSequences:
    examples = [(prompt, answer) for prompt, answers in drawn for answer in answers]
    masks = [[False] * len(prompt) + [True] * len(answer) for prompt, answer in examples]
    (micro,) = pack([prompt + answer for prompt, answer in examples], masks, range(len(examples)), 10**6)
    return micro


@examples(30)
@given(drawn=TREES, longest_masked_tree=st.sampled_from([0, LONGEST_MASKED_TREE]), form=forms(HEADS), data=st.data())
def test_any_part_attends_to_all_that_it_sees(
    drawn: Any, longest_masked_tree: int, form: AttentionForm, data: Any
) -> None:
    """Values and gradients agree wherever trees are cut, under a mask or branch by branch."""
    packed = trees(drawn)
    tokens = len(packed.subtree_ends)
    part = torch.tensor(sorted(data.draw(st.sets(st.integers(0, tokens - 1), min_size=1))))
    inputs = [each.requires_grad_() for each in qkv(tokens)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_attention, "LONGEST_MASKED_TREE", longest_masked_tree)
        layout = part_layout(packed, part, CPU)
    query, key, value = inputs
    found = layout.attend(1, query[part], key, value, form)
    expected = by_definition(*inputs, seen_in_trees(packed), form)[part]
    torch.testing.assert_close(found, expected)
    of_result = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours, theirs = (torch.autograd.grad(each, inputs, of_result) for each in (found, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)  # gradients of keys are summed in fp32


def test_no_query_of_a_long_tree_is_computed_twice_or_with_keys_that_it_does_not_see() -> None:
    """The part has all tokens of a prompt of 4 and answers of 3, 2 and 2, except the first two and the eighth."""
    answers = [[0, 1, 1, 1], [0, 2, 2], [1, 1, 1]]  # the last token predicts nothing
    packed = trees([([3] * 4, answers)])
    part = torch.tensor([place for place in range(len(packed.subtree_ends)) if place not in (0, 1, 7)])
    found = [(part[row.queries].tolist(), row.keys.tolist()) for row in query_blocks(packed.subtree_ends, 0, 10, part)]
    assert found == [
        ([2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6]),
        ([8, 9], [0, 1, 2, 3, 8, 9]),
    ]
