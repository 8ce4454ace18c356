"""Significance of a rise and of a fall in a noisy series."""

from __future__ import annotations

import random

import pytest

from launcher.explain.trend import fall_of, noise_of, rise_of

SERIES = 400
"""Series of each simulation: at a probability of 0.5% four false alarms are ten times likelier than twelve."""


def noisy(level: float, steps: int, chance: random.Random, slope: float = 0.0, lasting: float = 0.0) -> list[float]:
    """A series with a trend. lasting: share of the noise of a step that is left in the next one."""
    found, noise = [], 0.0
    for step in range(steps):
        noise = lasting * noise + chance.gauss(0, 0.05)
        found.append(level + slope * step + noise)
    return found


@pytest.mark.parametrize("steps", [50, 101, 400])
@pytest.mark.parametrize("lasting", [0.0, 0.2])
def test_a_stationary_series_falls_in_less_than_one_of_a_hundred_cases(steps: int, lasting: float):
    chance = random.Random(steps)
    alarms = sum(fall_of(noisy(0.3, steps, chance, lasting=lasting)) is not None for _ in range(SERIES))
    assert alarms < SERIES // 100


def test_a_stationary_series_of_shares_falls_in_less_than_one_of_a_hundred_cases():
    chance = random.Random(2)
    series = ([sum(chance.random() < 0.1 for _ in range(64)) / 64 for _ in range(101)] for _ in range(SERIES))
    assert sum(fall_of(one) is not None for one in series) < SERIES // 100


def test_a_rising_series_is_not_called_flat_in_more_than_one_of_a_hundred_cases():
    chance = random.Random(3)
    flat = sum(not rise_of(noisy(0.3, 100, chance, slope=0.001)).significant for _ in range(SERIES))
    assert flat < SERIES // 100


def test_a_stationary_series_rises_in_less_than_one_of_a_hundred_cases():
    chance = random.Random(4)
    assert sum(rise_of(noisy(0.3, 100, chance)).significant for _ in range(SERIES)) < SERIES // 100


def test_a_fall_after_a_rise_is_found_with_its_numbers():
    fall = fall_of([0.2, 0.22] * 20 + [0.8, 0.82] * 20 + [0.5, 0.52] * 10)
    assert fall is not None
    assert (fall.window, fall.reached) == (10, 50)
    assert (fall.first, fall.best, fall.last) == pytest.approx((0.21, 0.81, 0.51))


def test_a_dip_below_the_start_alone_is_no_fall():
    assert fall_of([0.3, 0.32] * 20 + [0.1, 0.12] * 20) is None


def test_a_short_series_has_no_fall():
    assert fall_of([0.0] * 10 + [1.0] * 10 + [0.0] * 9) is None


def test_a_trend_hardly_changes_the_noise():
    chance = random.Random(5)
    flat = noisy(0.3, 1000, chance)
    assert noise_of(flat) == pytest.approx(0.05, rel=0.1)
    assert noise_of([value + 0.002 * step for step, value in enumerate(flat)]) == pytest.approx(0.05, rel=0.1)
