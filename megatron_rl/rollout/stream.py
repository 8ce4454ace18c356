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
        self._seed = seed
        self._environment = environment

    def problem(self, ordinal: int) -> Problem:
        return self._problems[problem_index(len(self._problems), self._seed, ordinal, self._environment)]


def problem_index(count: int, seed: int, ordinal: int, environment: str = "") -> int:
    """Index in [0, count) of the problem that `ordinal` stands for: every `count` ordinals visit each once."""
    epoch, position = divmod(ordinal, count)
    return epoch_order(count, seed, epoch, environment)[position]


@lru_cache(maxsize=64)  # one step may span the end of a pass; passes over millions of problems take long to order
def epoch_order(count: int, seed: int, epoch: int, environment: str = "") -> tuple[int, ...]:
    """Order of [0, count) in pass `epoch`: indices sorted by 64-bit words of SHAKE256, little-endian."""
    purpose = ":".join(["mrl.epoch", str(seed), str(epoch), *filter(None, [environment])])
    sort_keys = struct.unpack(f"<{count}Q", shake_256(purpose.encode()).digest(8 * count))
    return tuple(sorted(range(count), key=sort_keys.__getitem__))


def shares(start: int, count: int, drivers: int) -> list[range]:
    """Contiguous shares of the ordinals [start, start + count), one per rollout driver; sizes differ by at most 1."""
    edges = [start + count * driver // drivers for driver in range(drivers + 1)]
    return [range(first, last) for first, last in pairwise(edges)]
