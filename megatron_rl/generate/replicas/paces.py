"""Speed of decoding, and the replicas that are far slower than the others. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from statistics import median
from typing import NamedTuple, TypeVar

SLOWER = 4.0
"""A replica that needs this many times the others' seconds per token gets no more requests."""
MEASURED_S = 60.0
"""Seconds of decoding, summed over its samples, before a replica is judged."""

Key = TypeVar("Key", bound=Hashable)


class DecodePace(NamedTuple):
    """Decoding speed of a replica: tokens of all its samples, and the seconds that they took."""

    tokens: int = 0
    seconds: float = 0.0

    def plus(self, tokens: int, seconds: float) -> DecodePace:
        return DecodePace(self.tokens + tokens, self.seconds + seconds)


def too_slow(paces: Mapping[Key, DecodePace]) -> list[Key]:
    """Return the replicas whose seconds per token exceed SLOWER times the median of the others; none if only one was
    measured."""
    measured = {key: pace.seconds / max(1, pace.tokens) for key, pace in paces.items() if pace.seconds >= MEASURED_S}
    if len(measured) < 2:
        return []
    # What exceeds twice the median of the others belongs to the slower half, and without any one of that half the rest
    # has the same median. So one median, that of all but the slowest, serves for all.
    limit = SLOWER * median(sorted(measured.values())[:-1])
    return [key for key, per_token in measured.items() if per_token > limit]
