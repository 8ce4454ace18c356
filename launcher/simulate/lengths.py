"""How long answers are: as a run saw them, or as many of its kind."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from statistics import NormalDist
from typing import Protocol

USUAL_SPREAD = 0.9
"""Standard deviation of the logarithm of an answer's length, where no run says: the longest of 1,000 answers is then
twelve times the mean, as far as the limit lets it."""
_HALVINGS = 60
_NORMAL = NormalDist()


class Lengths(Protocol):
    """Tokens of the answers to a prompt."""

    def of_group(self, seed: int, ordinal: int, size: int) -> list[int]:
        """Of the `size` answers to the prompt `ordinal`: the same whenever they are asked for."""
        ...

    @property
    def mean(self) -> float:
        """Tokens of an answer."""
        ...


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Lengths whose logarithm is normal, cut at the limit."""

    median: float
    """Tokens; of the distribution before it is cut."""
    spread: float
    """Standard deviation of the logarithm; 0: all answers are alike."""
    maximum: int
    """Tokens at which an answer is cut."""

    @classmethod
    def with_mean(cls, mean: float, maximum: int, spread: float = USUAL_SPREAD) -> Lognormal:
        """The one of this spread whose answers, cut at the limit, have this mean. Raises ValueError where the mean is
        not between 1 and the limit."""
        if not 1 <= mean <= maximum:
            raise ValueError(f"a mean of {mean:g} tokens is not between 1 and the limit of {maximum:,}")
        if mean > 0.995 * maximum:
            return cls(float(maximum), 0.0, maximum)
        return cls(_solve(lambda median: cls(median, spread, maximum).mean, mean, 1e-3, 1e3 * maximum), spread, maximum)

    @classmethod
    def fitted(cls, mean: float, largest: float, cut: float, answers: int, maximum: int) -> Lognormal:
        """The one that a run's record shows.

        Args:
            mean: of all answers.
            largest: of `answers`, on average.
            cut: share of the answers that reached the limit.
        """

        def beyond(spread: float) -> float:
            """How much more it has at its upper end than the record."""
            one = cls.with_mean(mean, maximum, spread)
            if cut:
                return 1 - one._below(maximum) - cut
            return one._quantile(1 - 0.56 / answers) - largest  # about the mean of the largest: Gumbel

        if mean > 0.995 * maximum or largest <= mean:
            return cls.with_mean(mean, maximum, 0.0)
        return cls.with_mean(mean, maximum, _solve(beyond, 0.0, 0.01, 3.0))

    def of_group(self, seed: int, ordinal: int, size: int) -> list[int]:
        numbers = Random(seed << 64 | ordinal)
        return [
            max(1, min(self.maximum, round(self.median * math.exp(self.spread * numbers.gauss(0.0, 1.0)))))
            for _ in range(size)
        ]

    @property
    def mean(self) -> float:
        if not self.spread:
            return min(self.median, self.maximum)
        place = math.log(self.maximum / self.median) / self.spread
        uncut = self.median * math.exp(self.spread**2 / 2) * _NORMAL.cdf(place - self.spread)
        return uncut + self.maximum * (1 - _NORMAL.cdf(place))

    def _below(self, tokens: float) -> float:
        return _NORMAL.cdf(math.log(tokens / self.median) / self.spread)

    def _quantile(self, share: float) -> float:
        return min(self.maximum, self.median * math.exp(self.spread * _NORMAL.inv_cdf(share)))


@dataclass(frozen=True, slots=True)
class Trace:
    """Lengths that are given, in the order of ordinals and samples; used again from the beginning."""

    tokens: tuple[int, ...]

    def of_group(self, seed: int, ordinal: int, size: int) -> list[int]:
        del seed
        return [self.tokens[(ordinal * size + sample) % len(self.tokens)] for sample in range(size)]

    @property
    def mean(self) -> float:
        return sum(self.tokens) / len(self.tokens)


def _solve(rising: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Where a function that never falls reaches a value, between two arguments; the nearer end where it does not."""
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if rising(middle) < wanted else (low, middle)
    return high
