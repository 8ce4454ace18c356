"""pass@k, avg@k and maj@k against their definitions: all ways to draw, in exact fractions."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.algorithms.evaluation_scores import (
    average,
    interval,
    majority,
    mean_over_problems,
    mean_scores,
    pass_at_k,
    powers_up_to,
    problem_scores,
    score_names,
)
from megatron_rl.contract.evaluation_records import MeanScore, ScoredAnswer

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


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_average_over_all_ways_to_draw_k_answers(right: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(right)))
    draws = [any(drawn) for drawn in combinations(right, k)]
    assert pass_at_k(len(right), sum(right), k) == pytest.approx(sum(draws) / len(draws))


def test_problem_with_too_few_answers_is_excluded_from_a_score() -> None:
    right, wrong = answer(True), answer(False)
    problems = [[right, wrong], [right], []]
    of_each = [problem_scores(each, [1, 2], 2, compares_answers=False) for each in problems]
    found = mean_scores(of_each, score_names([1, 2], 2))
    assert found["pass@2"] == mean_over_problems([1.0]) and found["pass@1"] == found["avg@2"]
    assert (mean := found["avg@2"]) is not None and (mean.value, mean.problems) == (0.75, 2)
    assert found["maj@2"] is None and average([[]]) is None


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_interval_contains_the_mean_and_stays_within_shares(values: list[float]) -> None:
    score = mean_over_problems(values)
    assert score is not None
    low, high = interval(score)
    assert 0 <= low <= score.value <= high <= 1
    assert low < high, "also where all problems are alike"


@given(st.integers(1, 300), st.data())
def test_interval_of_single_answers_is_wilsons(count: int, data: st.DataObject) -> None:
    """The bounds are the shares p0 from which the found one is 1.96 standard errors of p0 away (Wilson 1927)."""
    right = data.draw(st.integers(0, count))
    low, high = interval(MeanScore(right / count, None, count))
    for bound in (low, high):
        if 0 < bound < 1:
            away = abs(right / count - bound) / math.sqrt(bound * (1 - bound) / count)
            assert away == pytest.approx(1.959964, rel=1e-6)


def test_interval_narrows_where_problems_vary_less_than_single_answers() -> None:
    low, high = interval(MeanScore(0.5, 0.01, 100))
    assert (low, high) == pytest.approx((0.48, 0.52), abs=1e-3), "the mean and two of its standard errors"
    single = interval(MeanScore(0.5, 0.0502, 100))
    assert single[0] < low < high < single[1]


ballots = st.lists(st.tuples(st.sampled_from(["1", "2", "3", None]), st.booleans()), min_size=1, max_size=9)


@given(ballots)
def test_majority_is_the_share_of_right_ones_among_the_most_frequent_answers(
    cast: list[tuple[str | None, bool]],
) -> None:
    counted = Counter(vote for vote, _ in cast if vote is not None)
    first = [vote for vote, count in counted.items() if count == max(counted.values())]
    right = [any(is_right for vote, is_right in cast if vote == one) for one in first]
    expected = sum(right) / len(right) if right else 0.0
    assert majority([answer(is_right, vote) for vote, is_right in cast]) == expected


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
