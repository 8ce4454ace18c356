"""Distribution of the lengths of answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from statistics import NormalDist

USUAL_SPREAD = 0.9
"""Standard deviation of the logarithm of an answer's length, if no run was measured. The longest of 1,000 answers is
then twelve times the mean, unless the limit cuts it."""
_HALVINGS = 60
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Lengths in tokens whose logarithm is normally distributed, cut at a limit."""

    median: float
    """Median of the distribution before it is cut, in tokens."""
    spread: float
    """Standard deviation of the logarithm; 0: all answers are equally long."""
    maximum: int
    """Limit at which an answer is cut, in tokens."""

    @classmethod
    def with_mean(cls, mean: float, maximum: int, spread: float = USUAL_SPREAD) -> Lognormal:
        """Return the distribution whose answers, cut at the limit, have this mean.

        Raises:
            ValueError: the mean is not between 1 and the limit.
        """
        if not 1 <= mean <= maximum:
            raise ValueError(f"a mean of {mean:g} tokens is not between 1 and the limit of {maximum:,}")
        if mean > 0.995 * maximum:
            return cls(float(maximum), 0.0, maximum)
        return cls(_solve(lambda median: cls(median, spread, maximum).mean, mean, 1e-3, 1e3 * maximum), spread, maximum)

    @classmethod
    def fitted(cls, mean: float, largest: float, cut: float, answers: int, maximum: int) -> Lognormal:
        """Return the distribution that explains a run's record.

        Args:
            mean: mean length of all answers.
            largest: length of the longest of `answers` answers, on average.
            cut: share of the answers that reached the limit.
        """

        def beyond(spread: float) -> float:
            """Excess of the distribution over the record at the upper end."""
            one = cls.with_mean(mean, maximum, spread)
            if cut:
                return 1 - one._below(maximum) - cut
            return one._quantile(1 - 0.56 / answers) - largest  # about the mean of the largest: Gumbel

        if mean > 0.995 * maximum or largest <= mean:
            return cls.with_mean(mean, maximum, 0.0)
        return cls.with_mean(mean, maximum, _solve(beyond, 0.0, 0.01, 3.0))

    def of_group(self, seed: int, ordinal: int, size: int) -> list[int]:
        """Draw the lengths of the `size` answers to the prompt `ordinal`; equal arguments give equal lengths."""
        numbers = Random(seed << 64 | ordinal)
        return [
            max(1, min(self.maximum, round(self.median * math.exp(self.spread * numbers.gauss(0.0, 1.0)))))
            for _ in range(size)
        ]

    @property
    def mean(self) -> float:
        """Mean tokens of an answer, cut at the limit."""
        if not self.spread:
            return min(self.median, self.maximum)
        limit = math.log(self.maximum / self.median) / self.spread
        uncut = self.median * math.exp(self.spread**2 / 2) * _NORMAL.cdf(limit - self.spread)
        return uncut + self.maximum * (1 - _NORMAL.cdf(limit))

    def _below(self, tokens: float) -> float:
        return _NORMAL.cdf(math.log(tokens / self.median) / self.spread)

    def _quantile(self, share: float) -> float:
        return min(self.maximum, self.median * math.exp(self.spread * _NORMAL.inv_cdf(share)))


def _solve(rising: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Return the argument between `low` and `high` at which a function that never falls reaches a value, by
    bisection."""
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if rising(middle) < wanted else (low, middle)
    return high
