"""The prompt stream: order of the problems of one set, mixture of several sets, and shares of the drivers."""

from __future__ import annotations

import struct
from collections import Counter
from hashlib import shake_256

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.agent.api import TrainingSet
from megatron_rl.agent.trajectories import Problem
from megatron_rl.learn.rollout.stream import Mixture, PromptStream, epoch_order, interleaved, shares, split

seeds = st.integers(0, 2**64)
counts = st.integers(1, 60)
weights = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6)


# One set


@given(counts, seeds, st.integers(0, 1000))
def test_each_pass_visits_every_problem_exactly_once(count: int, seed: int, epoch: int) -> None:
    stream = PromptStream([Problem(str(index), {}) for index in range(count)], seed)
    visited = [stream.problem(ordinal).prompt for ordinal in range(epoch * count, (epoch + 1) * count)]
    assert sorted(map(int, visited)) == list(range(count))


def test_each_pass_and_each_seed_has_its_own_order() -> None:
    orders = [tuple(epoch_order(50, seed, epoch).tolist()) for seed in range(5) for epoch in range(5)]
    assert len(set(orders)) == len(orders)
    assert tuple(range(50)) not in orders


@given(counts, seeds, st.integers(0, 1000), st.sampled_from(["", "sums"]))
def test_the_order_is_that_of_the_words_of_a_hash(count: int, seed: int, epoch: int, environment: str) -> None:
    purpose = f"mrl.epoch:{seed}:{epoch}" + (f":{environment}" if environment else "")
    words = struct.unpack(f"<{count}Q", shake_256(purpose.encode()).digest(8 * count))
    expected = sorted(range(count), key=words.__getitem__)
    assert epoch_order(count, seed, epoch, environment).tolist() == expected


def test_order_is_pinned_across_machines_and_python_versions() -> None:
    assert epoch_order(8, seed=0, epoch=0).tolist() == [1, 0, 6, 3, 7, 4, 2, 5]
    assert epoch_order(8, seed=0, epoch=1).tolist() == [4, 6, 3, 1, 2, 0, 7, 5]


# Several sets


def training_set(name: str, weight: float, size: int) -> TrainingSet:
    return TrainingSet(name, weight, [Problem(f"{name} {number}", {}, name) for number in range(size)])


@given(weights, st.integers(0, 200))
def test_a_step_is_split_by_largest_remainder_and_each_set_gets_at_least_one(weights: list[float], more: int) -> None:
    total = len(weights) + more
    parts = split(weights, total)
    assert sum(parts) == total and min(parts) >= 1
    exact = [weight / sum(weights) * total for weight in weights]
    if min(exact) >= 1:
        assert all(abs(part - share) < 1 for part, share in zip(parts, exact, strict=True))


@pytest.mark.parametrize(
    ("weights", "total", "parts"),
    [
        ([0.5, 0.3, 0.2], 4, [2, 1, 1]),
        ([2.0, 1.0], 32, [21, 11]),
        ([1.0, 1e-6, 1e-6], 3, [1, 1, 1]),
    ],
)
def test_examples_of_a_split(weights: list[float], total: int, parts: list[int]) -> None:
    assert split(weights, total) == parts


@examples(30)
@given(
    st.lists(st.tuples(st.floats(0.1, 10.0), st.integers(1, 9)), min_size=1, max_size=4),
    st.integers(1, 8),
    st.integers(0, 99),
)
def test_each_set_is_visited_in_passes_and_each_step_has_the_same_split(
    given_sets: list[tuple[float, int]], prompts: int, start: int
) -> None:
    """Also in a new mixture that starts at any ordinal, as after a restart."""
    sets = [training_set(f"e{number}", weight, size) for number, (weight, size) in enumerate(given_sets)]
    seen = [Mixture(sets, 7, prompts).problem(ordinal) for ordinal in range(start + 60)]
    again = Mixture(sets, 7, prompts)
    assert [again.problem(ordinal) for ordinal in range(start, start + 60)] == seen[start:]
    cycle = prompts * -(-len(sets) // prompts)
    for first in range(0, len(seen) - cycle, cycle):
        assert Counter(problem.environment for problem in seen[first : first + cycle]) == Counter(
            problem.environment for problem in seen[:cycle]
        )
    for each in sets:
        its = [problem for problem in seen if problem.environment == each.environment]
        passes = [its[at : at + len(each.problems)] for at in range(0, len(its), len(each.problems))]
        assert all(len({problem.prompt for problem in one}) == len(one) for one in passes)
        stream = PromptStream(each.problems, 7, each.environment)
        assert its == [stream.problem(number) for number in range(len(its))]


def test_sets_take_turns_within_a_step() -> None:
    assert "".join("ab"[part] for part, _ in interleaved([4, 2])) == "abaaba"


def test_a_set_without_problems_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="environment 'riddles' has no training problems"):
        Mixture([training_set("sums", 1.0, 3), training_set("riddles", 1.0, 0)], 0, 4)
    with pytest.raises(ValueError, match="the environment has no training problems"):
        PromptStream([], seed=0)


# Shares of the drivers


def test_drivers_take_turns_if_there_are_few_ordinals() -> None:
    owners = [next(driver for driver, part in enumerate(shares(start, 1, 3)) if part) for start in range(6)]
    assert owners == [0, 1, 2, 0, 1, 2]


@given(st.integers(0, 10**9), st.integers(0, 500), st.integers(1, 64))
def test_shares_are_contiguous_even_and_complete(start: int, count: int, drivers: int) -> None:
    parts = shares(start, count, drivers)
    assert len(parts) == drivers
    flat = [ordinal for part in parts for ordinal in part]
    assert (flat if count >= drivers else sorted(flat)) == list(range(start, start + count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
