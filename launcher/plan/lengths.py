"""Distribution of the lengths of answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

USUAL_SPREAD = 0.9
"""Standard deviation of the logarithm of an answer's length, if no run was measured. The longest of 1,000 answers is
then twelve times the mean, unless the limit cuts it."""
POINTS = 256
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Lengths in tokens whose logarithm is normally distributed, cut at a limit."""

    median: float
    """Median of the distribution before it is cut, in tokens."""
    spread: float
    """Standard deviation of the logarithm; 0: all answers are equally long."""
    maximum: int

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
        return cls(solve(lambda median: cls(median, spread, maximum).mean, mean, 1e-3, 1e3 * maximum), spread, maximum)

    @classmethod
    def fitted(cls, mean: float, largest: float, cut: float, answers: int, maximum: int) -> Lognormal:
        """Return the distribution that explains a run's record.

        Args:
            mean: mean length of all answers.
            largest: length of the longest of `answers` answers, on average.
            cut: share of the answers that reached the limit.
        """

        def beyond(spread: float) -> float:
            one = cls.with_mean(mean, maximum, spread)
            if cut:
                return one.reach(maximum) - cut
            return one._quantile(1 - 0.56 / answers) - largest  # about the mean of the largest: Gumbel

        if mean > 0.995 * maximum or largest <= mean:
            return cls.with_mean(mean, maximum, 0.0)
        return cls.with_mean(mean, maximum, solve(beyond, 0.0, 0.01, 3.0))

    @property
    def mean(self) -> float:
        if not self.spread:
            return min(self.median, self.maximum)
        limit = math.log(self.maximum / self.median) / self.spread
        uncut = self.median * math.exp(self.spread**2 / 2) * _NORMAL.cdf(limit - self.spread)
        return uncut + self.maximum * (1 - _NORMAL.cdf(limit))

    def reach(self, tokens: float) -> float:
        """Share of the answers that have at least so many tokens."""
        if tokens <= 0 or tokens > self.maximum:
            return float(tokens <= 0)
        if not self.spread:
            return float(tokens <= self.median)
        return 1 - _NORMAL.cdf(math.log(tokens / self.median) / self.spread)

    def longest(self, answers: float) -> float:
        """Tokens that hardly any of so many answers exceeds."""
        return self._quantile(1 - 0.1 / max(1.0, answers)) if self.spread else self.mean

    def mean_of(self, value: Callable[[float], float], answers: float) -> float:
        """Mean, over so many answers, of a value that depends on the tokens of one."""
        end = self.longest(answers)
        width = end / POINTS
        shares = [self.reach(point * width) for point in range(POINTS)] + [self.reach(end)]
        between = (value((point + 0.5) * width) * (shares[point] - shares[point + 1]) for point in range(POINTS))
        return sum(between) + value(end) * shares[POINTS]

    def mean_longest(self, answers: int) -> float:
        width = self.longest(answers) / POINTS
        return width * sum(1 - (1 - self.reach((point + 0.5) * width)) ** answers for point in range(POINTS))

    def _quantile(self, share: float) -> float:
        return min(self.maximum, self.median * math.exp(self.spread * _NORMAL.inv_cdf(share)))


def solve(rising: Callable[[float], float], wanted: float, low: float, high: float, halvings: int = 60) -> float:
    """Return the argument between `low` and `high` at which a function that never falls reaches a value, by
    bisection."""
    for _ in range(halvings):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if rising(middle) < wanted else (low, middle)
    return high
