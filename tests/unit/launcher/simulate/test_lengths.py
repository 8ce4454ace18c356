"""The distribution of lengths: its mean, its limit, and its fit to a record."""

from __future__ import annotations

from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.simulate.lengths import Lognormal


@given(mean=st.floats(1, 10_000), maximum=st.integers(1, 20_000), spread=st.floats(0.01, 2.5))
def test_a_lognormal_has_the_requested_mean_although_it_is_cut(mean, maximum, spread):
    if mean > maximum:
        with pytest.raises(ValueError, match="is not between 1 and the limit"):
            Lognormal.with_mean(mean, maximum, spread)
        return
    assert Lognormal.with_mean(mean, maximum, spread).mean == pytest.approx(mean, rel=0.006)


def test_drawn_lengths_have_the_mean_of_the_formula_and_keep_the_limit():
    lengths = Lognormal.with_mean(3200, 10975)
    drawn = [tokens for ordinal in range(500) for tokens in lengths.of_group(0, ordinal, 16)]
    assert fmean(drawn) == pytest.approx(lengths.mean, rel=0.02)
    assert (min(drawn) >= 1, max(drawn)) == (True, 10975)
    assert lengths.of_group(0, 7, 16) == lengths.of_group(0, 7, 16) != lengths.of_group(1, 7, 16)


@pytest.mark.parametrize(("spread", "maximum"), [(0.6, 100_000), (0.9, 4000), (1.3, 8000)])
def test_a_fit_finds_the_spread_behind_a_record(spread, maximum):
    true = Lognormal.with_mean(1500, maximum, spread)
    steps = [[n for k in range(64) for n in true.of_group(3, 64 * step + k, 16)] for step in range(30)]
    answers = [tokens for step in steps for tokens in step]
    cut = fmean(tokens == maximum for tokens in answers)
    found = Lognormal.fitted(fmean(answers), fmean(max(step) for step in steps), cut, 1024, maximum)
    assert found.spread == pytest.approx(spread, rel=0.08)
    assert found.mean == pytest.approx(true.mean, rel=0.03)


def test_equal_answers_have_no_spread():
    assert Lognormal.fitted(20.0, 20.0, 0.0, 64, 100).of_group(0, 0, 3) == [20, 20, 20]
    assert Lognormal.fitted(100.0, 100.0, 1.0, 64, 100).of_group(0, 0, 3) == [100, 100, 100]
