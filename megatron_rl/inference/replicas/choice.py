"""Which replica is asked, and which is too slow to be. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import NamedTuple, TypeVar

Key = TypeVar("Key")

SLOWER = 4.0
"""Times longer than the others for a token: then a replica is asked no more."""
MEASURED_S = 60.0
"""Seconds of decoding, of all its samples together, by which a replica is judged."""


class Pace(NamedTuple):
    """How fast a replica decodes: what its samples were given, and in how long."""

    tokens: int = 0
    seconds: float = 0.0

    def plus(self, tokens: int, seconds: float) -> Pace:
        return Pace(self.tokens + tokens, self.seconds + seconds)


def choose(outstanding: Mapping[Key, int], home: Key | None = None) -> Key | None:
    """The replica to ask; None where there is none.

    Args:
        outstanding: tokens that each still has to compute. Of several with equally few the first is chosen.
        home: the one that has in its cache what the request begins with.
    """
    if home is not None and home in outstanding:
        return home
    return min(outstanding, key=lambda key: outstanding[key], default=None)


def too_slow(paces: Mapping[Key, Pace]) -> list[Key]:
    """Replicas that take far longer for a token than the others do in the middle; none where there is but one that was
    measured."""
    measured = {key: pace for key, pace in paces.items() if pace.seconds >= MEASURED_S}
    slow = []
    for key, pace in measured.items():
        others = [other.seconds / max(1, other.tokens) for name, other in measured.items() if name != key]
        if others and pace.seconds / max(1, pace.tokens) > SLOWER * median(others):
            slow.append(key)
    return slow
