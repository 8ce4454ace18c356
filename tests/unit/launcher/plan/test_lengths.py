"""The distribution of lengths: its mean, its limit, and its fit to a record."""

from __future__ import annotations

import math
from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.plan.lengths import Lognormal


def draw(lengths: Lognormal, count: int) -> list[float]:
    chance = Random(1)
    drawn = (lengths.median * math.exp(lengths.spread * chance.gauss(0, 1)) for _ in range(count))
    return [max(1.0, min(lengths.maximum, tokens)) for tokens in drawn]


@given(mean=st.floats(1, 10_000), maximum=st.integers(1, 20_000), spread=st.floats(0.01, 2.5))
def test_a_lognormal_has_the_requested_mean_although_it_is_cut(mean, maximum, spread):
    if mean > maximum:
        with pytest.raises(ValueError, match="is not between 1 and the limit"):
            Lognormal.with_mean(mean, maximum, spread)
        return
    assert Lognormal.with_mean(mean, maximum, spread).mean == pytest.approx(mean, rel=0.006)


def test_shares_and_means_are_those_of_drawn_lengths():
    lengths = Lognormal.with_mean(3200, 10975)
    drawn = draw(lengths, 8000)
    assert fmean(drawn) == pytest.approx(lengths.mean, rel=0.02)
    assert fmean(tokens >= 5000 for tokens in drawn) == pytest.approx(lengths.reach(5000), abs=0.01)
    assert fmean(tokens == 10975 for tokens in drawn) == pytest.approx(lengths.reach(10975), abs=0.01)
    assert lengths.reach(10976) == 0
    assert lengths.mean_of(lambda tokens: tokens, 1000) == pytest.approx(lengths.mean, rel=0.01)
    assert fmean(tokens**2 for tokens in drawn) == pytest.approx(lengths.mean_of(lambda n: n * n, 1000), rel=0.04)
    longest = [max(drawn[first : first + 8]) for first in range(0, 8000, 8)]
    assert fmean(longest) == pytest.approx(lengths.mean_longest(8), rel=0.02)


@pytest.mark.parametrize(("spread", "maximum"), [(0.6, 100_000), (0.9, 4000), (1.3, 8000)])
def test_a_fit_finds_the_spread_behind_a_record(spread, maximum):
    true = Lognormal.with_mean(1500, maximum, spread)
    answers = draw(true, 30 * 1024)
    steps = [answers[first : first + 1024] for first in range(0, len(answers), 1024)]
    cut = fmean(tokens == maximum for tokens in answers)
    found = Lognormal.fitted(fmean(answers), fmean(max(step) for step in steps), cut, 1024, maximum)
    assert found.spread == pytest.approx(spread, rel=0.08)
    assert found.mean == pytest.approx(true.mean, rel=0.03)


def test_equal_answers_have_no_spread():
    for tokens, cut in ((20.0, 0.0), (100.0, 1.0)):
        found = Lognormal.fitted(tokens, tokens, cut, 64, 100)
        assert (found.spread, found.mean) == (0, pytest.approx(tokens))
        assert (found.reach(0.99 * tokens), found.reach(1.01 * tokens)) == (1, 0)
        assert found.mean_of(lambda length: length**2, 64) == pytest.approx(tokens**2)
        assert found.mean_longest(64) == pytest.approx(tokens)
