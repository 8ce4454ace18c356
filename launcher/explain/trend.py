"""Pure: whether a noisy series rose or fell, by z-tests of the means of two windows.

The noise of a step is estimated from the differences of successive steps (von Neumann), which a slow trend hardly
changes. A window that was chosen as the best of many is compared with Bonferroni's correction for their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import sqrt
from statistics import NormalDist
from typing import NamedTuple

WINDOW = 10
PARTS = 20
"""Windows that a longer series is divided into: a window of 900 steps has 45."""
FALSE_ALARMS = 0.005
"""Probability that a series of noise alone passes a test."""


class Fall(NamedTuple):
    """A significant rise, and a significant fall after it."""

    window: int
    first: float
    best: float
    reached: int
    last: float


class Rise(NamedTuple):
    """Means of the first and of the last quarter of a series, and the standard error of their difference."""

    quarter: int
    before: float
    now: float
    error: float

    @property
    def significant(self) -> bool:
        return self.now - self.before > NormalDist().inv_cdf(1 - FALSE_ALARMS) * self.error


def noise_of(values: Sequence[float]) -> float:
    squares = [(after - before) ** 2 for before, after in pairwise(values)]
    return sqrt(sum(squares) / (2 * len(squares)))


def fall_of(values: Sequence[float]) -> Fall | None:
    """Return the fall of a series from its best window to its last; None unless it rose to the best, and fell from it,
    by more than noise."""
    window = max(WINDOW, len(values) // PARTS)
    if len(values) < 3 * window:
        return None
    # All windows of this length are tried, so the best of them is partly luck: of hundreds of means of pure noise the
    # highest lies two to three standard errors above the others. The level of the test is therefore divided by their
    # number. The mean of the first window is compared as well as that of the last: a series that only ever fell never
    # had a best to lose.
    sums = [0.0, *accumulate(values)]
    means = [(high - low) / window for low, high in zip(sums, sums[window:], strict=False)]
    best = max(range(len(means)), key=means.__getitem__)
    least = NormalDist().inv_cdf(1 - FALSE_ALARMS / len(means)) * noise_of(values) * sqrt(2 / window)
    if min(means[best] - means[0], means[best] - means[-1]) <= least:
        return None
    return Fall(window, means[0], means[best], best + window, means[-1])


def rise_of(values: Sequence[float]) -> Rise:
    quarter = len(values) // 4
    error = noise_of(values) * sqrt(2 / quarter)
    return Rise(quarter, sum(values[:quarter]) / quarter, sum(values[-quarter:]) / quarter, error)
