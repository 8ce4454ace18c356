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


def shares(chance: random.Random) -> list[float]:
    return [sum(chance.random() < 0.1 for _ in range(64)) / 64 for _ in range(101)]


@pytest.mark.parametrize(
    ("draw", "is_wrong"),
    [
        *(
            (lambda chance, n=n, lasting=lasting: noisy(0.3, n, chance, lasting=lasting), fall_of)
            for n in (50, 101, 400)
            for lasting in (0.0, 0.2)
        ),
        (shares, fall_of),
        (lambda chance: noisy(0.3, 100, chance, slope=0.001), lambda series: not rise_of(series).significant),
        (lambda chance: noisy(0.3, 100, chance), lambda series: rise_of(series).significant),
    ],
)
def test_in_less_than_one_of_a_hundred_series_a_trend_is_seen_that_is_not_there_or_missed(draw, is_wrong):
    chance = random.Random(1)
    assert sum(bool(is_wrong(draw(chance))) for _ in range(SERIES)) < SERIES // 100


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
