"""pass@k, avg@k and maj@k against their definitions: all ways to draw, in exact fractions."""

from __future__ import annotations

import math
import statistics
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.contract.evaluation_records import ScoredAnswer
from megatron_rl.run.evaluate.result import (
    average,
    majority,
    mean_over_problems,
    pass_at,
    pass_at_k,
    powers_up_to,
)

counts = st.integers(1, 400).flatmap(
    lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))
)  # answers, right ones, k


def answer(right: bool, vote: str | None = None) -> ScoredAnswer:
    return ScoredAnswer(float(right), 1, "stop", "", vote)


@given(counts)
def test_pass_at_k_is_the_ratio_of_binomials(numbers: tuple[int, int, int]) -> None:
    n, right, k = numbers
    exact = 1 - Fraction(math.comb(n - right, k), math.comb(n, k))
    assert pass_at_k(n, right, k) == pytest.approx(float(exact), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("numbers", [(4, 2, 5), (4, 2, 0), (4, 5, 1), (4, -1, 1), (0, 0, 1)])
def test_pass_at_k_of_too_few_answers_is_undefined(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        pass_at_k(*numbers)


def test_problem_with_too_few_answers_is_excluded_from_a_score() -> None:
    right, wrong = answer(True), answer(False)
    problems = [[right, wrong], [right], []]
    assert pass_at(problems, 2) == mean_over_problems([1.0])
    assert (found := average(problems)) is not None and (found.value, found.problems) == (0.75, 2)
    assert pass_at([[right]], 2) is None and average([[]]) is None


@given(st.lists(st.floats(0, 1), min_size=2, max_size=50))
def test_standard_error_is_that_of_a_mean_over_problems(values: list[float]) -> None:
    found = mean_over_problems(values)
    assert found is not None and found.standard_error is not None
    assert found.value == pytest.approx(statistics.fmean(values))
    assert found.standard_error == pytest.approx(statistics.stdev(values) / math.sqrt(len(values)), abs=1e-12)


def test_most_frequent_answer_wins() -> None:
    assert majority([answer(False, "1"), answer(True, "2"), answer(True, "2")]) == 1.0
    assert majority([answer(False, "1"), answer(False, "1"), answer(True, "2")]) == 0.0
    assert majority([answer(True, "2"), answer(False, "1")]) == 0.5, "a tie counts by how many of its answers are right"
    assert majority([answer(False, None), answer(False, None), answer(True, "2")]) == 1.0, (
        "a missing answer does not vote"
    )
    assert majority([answer(False, None)]) == 0.0
    assert majority([answer(False, "2"), answer(True, "2")]) == 1.0, "scored lower for its form, it says the same"


def test_pass_at_k_is_reported_for_powers_of_two_and_for_k() -> None:
    assert [powers_up_to(k) for k in (1, 2, 6, 32)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8, 16, 32]]
