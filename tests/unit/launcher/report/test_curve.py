"""Curves keep their peaks with few points."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from launcher.report.curve import downsample, rounded, smoothed

VALUES = st.one_of(st.none(), st.floats(-1e6, 1e6).map(rounded))


@given(st.lists(VALUES, min_size=1, max_size=300), st.integers(1, 20))
def test_a_short_curve_has_few_points_and_the_same_ends_and_extremes(values, buckets):
    steps = list(range(10, 10 + len(values)))
    points = downsample(steps, [values], buckets)
    assert len(points.steps) <= max(2 * buckets + 2, 2)
    assert points.steps == sorted(set(points.steps))
    assert {steps[0], steps[-1]} <= set(points.steps)
    assert all(values[step - 10] == kept for step, kept in zip(points.steps, points.columns[0], strict=True))
    known = [value for value in values if value is not None]
    if known:
        kept = [value for value in points.columns[0] if value is not None]
        assert (min(kept), max(kept)) == (min(known), max(known))


def test_each_column_keeps_its_own_peak_at_its_own_step():
    steps = list(range(1000))
    low, high = [float(step == 123) for step in steps], [float(step == 777) for step in steps]
    points = downsample(steps, [low, high], 10)
    assert points.columns[0][points.steps.index(123)] == 1.0
    assert points.columns[1][points.steps.index(777)] == 1.0


def test_a_smoothed_curve_is_the_mean_of_the_neighbours_that_have_a_value():
    values = [float(step) for step in range(100)]
    assert smoothed(values)[50] == 50.0
    assert smoothed(values)[0] == 1.5  # of 0 to 3: seven steps are averaged at least
    assert smoothed([3.0, None, None])[1] is None
    ended = smoothed([None, *values[:40], None, None])
    assert [at for at, value in enumerate(ended) if value is None] == [0, 41, 42]
    gaps = [1.0 if step % 2 else None for step in range(100)]
    assert set(smoothed(gaps)[1:]) == {1.0}


def test_numbers_that_are_not_finite_are_left_out():
    assert rounded(math.inf) is None
    assert rounded(math.nan) is None
    assert rounded(0.123456789) == 0.12346
