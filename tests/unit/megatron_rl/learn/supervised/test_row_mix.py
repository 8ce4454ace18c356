"""Order of the rows of several sets: shares over any prefix, exact epochs, and the same after a resume at any row."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.agent.api import TrainingSet
from megatron_rl.agent.trajectories import Problem
from megatron_rl.learn.rollout.stream import Mixture
from megatron_rl.learn.supervised.row_mix import RowMix, Turns

WEIGHTS = st.lists(st.one_of(st.integers(1, 1000), st.sampled_from([0.1, 0.3, 0.7, 1e-3, 2.5])), min_size=1, max_size=8)


def rows(id: str, count: int, weight: float) -> TrainingSet:
    return TrainingSet(id, weight, [Problem(f"{id}{number}", {}, id) for number in range(count)])


@given(WEIGHTS)
def test_each_set_has_its_share_of_any_beginning_within_one_row(weights: list[float]) -> None:
    exact = [Fraction(repr(weight)) for weight in weights]
    shares = [each / sum(exact) for each in exact]
    turns, had = Turns(weights), [0] * len(weights)
    for turn in range(250):
        part, number = turns.place(turn)
        assert number == had[part]
        had[part] += 1
        assert all(abs((turn + 1) * share - count) < 1 for share, count in zip(shares, had, strict=True))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=5))
def test_epochs_are_exact_and_each_pass_has_every_row_once(sizes: list[tuple[int, int]]) -> None:
    """sizes: of each set, its rows and those that the run has of it."""
    sets = [rows(f"set{number}.", *size) for number, size in enumerate(sizes)]
    total = sum(had for _, had in sizes)
    mix = RowMix(sets, seed=3, total=total)
    seen = [mix.problem(ordinal) for ordinal in range(total)]
    for each, (count, had) in zip(sets, sizes, strict=True):
        own = [row.prompt for row in seen if row.environment == each.environment]
        assert len(own) == had
        for start in range(0, had, count):
            assert len({*own[start : start + count]}) == len(own[start : start + count])
    if len(sets) > 1:
        assert mix.passes(total) == {
            each.environment: had / count for each, (count, had) in zip(sets, sizes, strict=True)
        }


@given(WEIGHTS, st.lists(st.integers(0, 150), min_size=1, max_size=4))
def test_a_run_resumes_at_any_row(weights: list[float], ordinals: list[int]) -> None:
    sets = [rows(f"set{number}.", 7, weight) for number, weight in enumerate(weights)]
    one = RowMix(sets, seed=1)
    expected = [one.problem(ordinal) for ordinal in range(151)]
    resumed = RowMix(sets, seed=1)
    assert [resumed.problem(ordinal) for ordinal in ordinals] == [expected[ordinal] for ordinal in ordinals]


def test_small_weights_keep_their_share_of_small_steps() -> None:
    """A step of 8 rows cannot have a hundredth of them, but the run has."""
    mix = RowMix([rows("a", 50, 0.99), rows("b", 50, 0.01)], seed=0)
    assert Counter(mix.problem(ordinal).environment for ordinal in range(800)) == {"a": 792, "b": 8}


def test_one_set_has_the_order_of_the_prompt_stream() -> None:
    alone = [rows("", 13, 1.0)]
    mix, stream = RowMix(alone, seed=5), Mixture(alone, 5, 4)
    assert [mix.problem(ordinal) for ordinal in range(40)] == [stream.problem(ordinal) for ordinal in range(40)]
    assert mix.passes(40) == {}


def test_a_set_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="'b' has no training problems"):
        RowMix([rows("a", 3, 1.0), rows("b", 0, 1.0)], seed=0)
