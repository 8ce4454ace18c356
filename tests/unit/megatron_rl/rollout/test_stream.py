"""The prompt stream: every pass visits every problem once, in an order that nothing but seed and pass decides."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.agent.trajectories import Problem
from megatron_rl.rollout.stream import PromptStream, epoch_order, shares

seeds = st.integers(0, 2**64)
counts = st.integers(1, 60)


@given(counts, seeds, st.integers(0, 1000))
def test_each_pass_visits_every_problem_exactly_once(count: int, seed: int, epoch: int) -> None:
    stream = PromptStream([Problem(str(index), {}) for index in range(count)], seed)
    asked = [stream.problem(ordinal).prompt for ordinal in range(epoch * count, (epoch + 1) * count)]
    assert sorted(map(int, asked)) == list(range(count))


def test_passes_and_seeds_have_orders_of_their_own() -> None:
    orders = [epoch_order(50, seed, epoch) for seed in range(5) for epoch in range(5)]
    assert len(set(orders)) == len(orders)
    assert tuple(range(50)) not in orders


def test_order_is_pinned_across_machines_and_python_versions() -> None:
    assert epoch_order(8, seed=0, epoch=0) == (1, 0, 6, 3, 7, 4, 2, 5)
    assert epoch_order(8, seed=0, epoch=1) == (4, 6, 3, 1, 2, 0, 7, 5)


def test_every_problem_is_equally_likely_first() -> None:
    first = [epoch_order(4, 7, epoch)[0] for epoch in range(2000)]
    assert all(400 < first.count(index) < 600 for index in range(4))


def test_stream_hands_out_the_problems_in_that_order() -> None:
    problems = [Problem(str(index), {}) for index in range(5)]
    stream = PromptStream(problems, seed=3)
    expected = [problems[index] for epoch in range(3) for index in epoch_order(5, 3, epoch)]
    assert [stream.problem(ordinal) for ordinal in range(12)] == expected[:12]
    assert stream.problem(11) == expected[11]


def test_drivers_take_turns_where_there_are_few_ordinals() -> None:
    owners = [next(driver for driver, part in enumerate(shares(start, 1, 3)) if part) for start in range(6)]
    assert owners == [0, 1, 2, 0, 1, 2]


def test_stream_without_problems_is_refused() -> None:
    with pytest.raises(ValueError, match="no training problems"):
        PromptStream([], seed=0)


@given(st.integers(0, 10**9), st.integers(0, 500), st.integers(1, 64))
def test_shares_are_contiguous_even_and_complete(start: int, count: int, drivers: int) -> None:
    parts = shares(start, count, drivers)
    assert len(parts) == drivers
    flat = [ordinal for part in parts for ordinal in part]
    assert (flat if count >= drivers else sorted(flat)) == list(range(start, start + count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
