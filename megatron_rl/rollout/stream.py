"""The prompt stream: which problem each ordinal 0, 1, 2, ... stands for, and who answers it.

Everything here is a function of its arguments, and rests only on a hash with a published standard (SHAKE256, FIPS 202).
Python's and numpy's shuffles may change between versions; it cannot, so a run that resumes on another machine or
interpreter goes on with the same prompts.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from hashlib import shake_256
from itertools import pairwise

from megatron_rl.agent.trajectories import Problem


class PromptStream:
    """Endless passes over `problems`, each in an order of its own."""

    def __init__(self, problems: Sequence[Problem], seed: int, environment: str = "") -> None:
        """environment: whose problems they are, where there are several: each has orders of its own."""
        if not problems:
            name = f"environment {environment!r}" if environment else "the environment"
            raise ValueError(f"{name} has no training problems")
        self._problems = problems
        # One step may span the end of a pass, and passes over millions of problems take long to order.
        self._order = lru_cache(maxsize=2)(lambda epoch: epoch_order(len(problems), seed, epoch, environment))

    def problem(self, ordinal: int) -> Problem:
        """That `ordinal` stands for: as many as there are visit each once."""
        epoch, position = divmod(ordinal, len(self._problems))
        return self._problems[self._order(epoch)[position]]


def epoch_order(count: int, seed: int, epoch: int, environment: str = "") -> tuple[int, ...]:
    """Order of [0, count) in pass `epoch`: indices sorted by 64-bit words of SHAKE256, little-endian."""
    purpose = ":".join(["mrl.epoch", str(seed), str(epoch), *filter(None, [environment])])
    sort_keys = struct.unpack(f"<{count}Q", shake_256(purpose.encode()).digest(8 * count))
    return tuple(sorted(range(count), key=sort_keys.__getitem__))


def shares(start: int, count: int, drivers: int) -> list[range]:
    """Shares of the ordinals [start, start + count), one per rollout driver; sizes differ by at most 1. They are
    contiguous, except where there are fewer ordinals than drivers: then these take turns."""
    if count < drivers:
        return [range(start + (driver - start) % drivers, start + count, drivers) for driver in range(drivers)]
    edges = [start + count * driver // drivers for driver in range(drivers + 1)]
    return [range(first, last) for first, last in pairwise(edges)]
