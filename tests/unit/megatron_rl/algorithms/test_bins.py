"""Bins of bounded cost: few, and evenly filled if their number is given. On lengths only; test_packing uses tokens."""

from __future__ import annotations

from itertools import accumulate, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.algorithms.bins import ROWS_ARE_FREE, BinLimit, Tree, fill, spread

ROWS_PER_TOKEN = 5


def alone(lengths: list[int]) -> list[Tree]:
    """Sequences of these lengths without a common prefix."""
    return [Tree(1, [name], [length - 1], [0]) for name, length in enumerate(lengths)]


def groups(prompts: list[int], answers: list[list[int]]) -> list[Tree]:
    """Answers of these lengths that share only their prompt."""
    firsts = [0, *accumulate(map(len, answers))]
    return [
        Tree(prompt, range(first, first + len(rests)), rests, [0] * len(rests))
        for prompt, rests, first in zip(prompts, answers, firsts, strict=False)
    ]


def packed_tokens(trees: list[Tree], names: list[int]) -> int:
    """Cost of a bin whose sequences share only their prefix."""
    rests = {name: rest for tree in trees for name, rest in zip(tree.names, tree.rests, strict=True)}
    return sum(rests[name] for name in names) + sum(tree.prefix for tree in trees if {*tree.names} & {*names})


def loads(lengths: list[int], bins: list[list[int]]) -> list[int]:
    return [sum(lengths[name] for name in names) for names in bins]


def best(lengths: list[int], count: int) -> int:
    """Load of the fullest of `count` bins in the best of all assignments."""
    ways = product(range(count), repeat=len(lengths))
    return min(max(sum(n for n, b in zip(lengths, way, strict=True) if b == each) for each in way) for way in ways)


LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=5)
GROUPS = st.lists(
    st.tuples(st.integers(1, 20), st.lists(st.integers(0, 30), min_size=1, max_size=6)), min_size=1, max_size=5
)


@given(LENGTHS, st.integers(30, 70))
def test_unrelated_sequences_need_no_more_bins_than_first_fit_decreasing(lengths: list[int], limit: int) -> None:
    """11/9 of the fewest and 6/9 (Dosa 2007)."""
    bins = fill(alone(lengths), BinLimit(limit, ROWS_PER_TOKEN))
    fewest = next(count for count in range(1, len(lengths) + 1) if best(lengths, count) <= limit)
    assert sorted(name for names in bins for name in names) == [*range(len(lengths))]
    assert max(loads(lengths, bins)) <= limit
    assert len(bins) <= fewest * 11 / 9 + 6 / 9


def test_group_stays_together_if_it_fits_and_is_split_if_that_fills_better() -> None:
    short = groups([10] * 4, [[10, 10]] * 4)  # a group is 30 tokens and 2 more for its rows
    assert sorted(fill(short, BinLimit(64, ROWS_PER_TOKEN))) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    long = groups([1] * 3, [[33, 33]] * 3)  # two groups in three bins of whole groups would leave half of each empty
    assert [*map(len, fill(long, BinLimit(103, ROWS_PER_TOKEN)))] == [3, 3]


@pytest.mark.parametrize(
    ("prompts", "answers"),
    [
        ([8, 7], [[40, 5, 60], [20, 35]]),
        ([2, 6, 18], [[20, 20], [30, 30], [10, 40]]),
        ([12, 7], [[10, 10], [20, 15, 15, 60, 40]]),
    ],
    ids=["the largest answers first", "group after group", "whole groups"],
)
def test_best_of_three_orders_is_used(prompts: list[int], answers: list[list[int]]) -> None:
    """Each order is the only one that needs two bins in one of these examples."""
    assert len(fill(groups(prompts, answers), BinLimit(100, ROWS_ARE_FREE))) == 2


def test_prompt_costs_again_only_in_another_bin() -> None:
    trees = groups([40], [[10] * 6])
    bins = fill(trees, BinLimit(100, ROWS_PER_TOKEN))
    assert sorted(packed_tokens(trees, names) for names in bins) == [
        70,
        70,
    ]  # an answer beside others adds 10, and 8 for its rows


def test_gathered_rows_count() -> None:
    """A prompt of 1000 tokens and 50 answers of one token are 1050 tokens, but 50,000 rows."""
    trees = groups([1000], [[1] * 50])
    assert len(fill(trees, BinLimit(2000, ROWS_PER_TOKEN))) > 5
    assert len(fill(trees, BinLimit(50_000, ROWS_PER_TOKEN))) == 1


def test_prefix_of_another_sequence_costs_nothing_beside_it() -> None:
    """The first three of four tokens, and the same four again."""
    tree = Tree(2, [0, 1, 2], [3, 4, 4], [0, 3, 4])
    assert fill([tree, *alone([3])], BinLimit(6, ROWS_PER_TOKEN)) in ([[0, 1, 2], [0]], [[0, 1, 2, 0]])
    assert (tree.tokens, tree.pairs) == (6, 21)


@given(GROUPS, st.integers(1, 120), st.integers(1, 12))
def test_given_number_of_bins_is_reached_without_empty_ones(
    drawn: list[tuple[int, list[int]]], limit: int, count: int
) -> None:
    trees = groups([prompt for prompt, _ in drawn], [rests for _, rests in drawn])
    names = sorted(name for tree in trees for name in tree.names)
    bins = spread(trees, BinLimit(limit, ROWS_PER_TOKEN), count)
    assert sorted(name for each in bins for name in each) == names
    assert all(each == sorted(each) and each for each in bins)
    assert len(bins) == max(len(fill(trees, BinLimit(limit, ROWS_PER_TOKEN))), min(count, len(names)))
    longest = max(tree.prefix + rest for tree in trees for rest in tree.rests)
    assert all(packed_tokens(trees, each) <= max(limit, longest) for each in bins)


@given(LENGTHS, st.integers(1, 4))
def test_bins_are_evenly_filled(lengths: list[int], count: int) -> None:
    """The load is at most 13/11 of the optimum, as for multifit (Yue 1990), plus the resolution of the bisection."""
    bins = spread(alone(lengths), BinLimit(10**6, ROWS_PER_TOKEN), count)
    assert max(loads(lengths, bins)) <= best(lengths, count) * 13 / 11 + 1
