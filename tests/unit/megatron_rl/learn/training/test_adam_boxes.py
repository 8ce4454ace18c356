"""A range of a tensor's elements is saved as boxes of the tensor."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.learn.training.adam_state import boxes


@st.composite
def ranges(draw: st.DrawFn) -> tuple[list[int], int, int]:
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@given(ranges())
def test_consecutive_boxes_cover_the_range(of: tuple[list[int], int, int]) -> None:
    shape, start, end = of
    numbered = torch.arange(math.prod(shape)).view(shape)
    found = [
        numbered[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))].flatten()
        for offset, size in boxes(shape, start, end)
    ]
    assert torch.cat([torch.arange(0), *found]).tolist() == list(range(start, end))


@given(ranges())
def test_boxes_are_few_and_none_is_empty(of: tuple[list[int], int, int]) -> None:
    found = list(boxes(*of))
    assert len(found) <= 2 * len(of[0]) - 1
    assert all(math.prod(size) > 0 for _, size in found)
