"""The prompt stream: the problem of each ordinal 0, 1, 2, ..., and the driver that answers it.

Every function here depends on its arguments alone, and on one hash with a published standard (SHAKE256, FIPS 202).
Python's and numpy's shuffles may change between versions; this hash cannot, so a run that resumes on another machine
or interpreter continues with the same prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import shake_256
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_rl.agent.api import TrainingSet
from megatron_rl.agent.trajectories import Problem


class Mixture:
    """Prompt stream of several sets. Each step's prompts are split over the sets by weight, and each set is visited in
    separate passes.

    A step with fewer prompts than sets cannot have a prompt of each: then several steps are split together. For
    example, three sets and two prompts per step: every two steps have the same split of four prompts.
    """

    def __init__(self, sets: Sequence[TrainingSet], seed: int, prompts_per_step: int) -> None:
        """Raises ValueError for a set without problems."""
        self.sets = sets
        self.streams = [PromptStream(each.problems, seed, each.environment) for each in sets]
        steps = -(-len(sets) // prompts_per_step)
        self._counts = split([each.weight for each in sets], steps * prompts_per_step)
        self._cycle = interleaved(self._counts)

    @property
    def cycle_length(self) -> int:
        """Ordinals after which the sets take turns again in the same order; each has some of them."""
        return len(self._cycle)

    def problem(self, ordinal: int) -> Problem:
        chosen, number = self.place(ordinal)
        return self.streams[chosen].problem(number)

    def place(self, ordinal: int) -> tuple[int, int]:
        """Return the index of the ordinal's set, and how many earlier ordinals that set has."""
        cycle, position = divmod(ordinal, len(self._cycle))
        chosen, number = self._cycle[position]
        return chosen, cycle * self._counts[chosen] + number


class PromptStream:
    """Endless passes over the problems of one set, each pass in its own order."""

    def __init__(self, problems: Sequence[Problem], seed: int, environment: str = "") -> None:
        """environment: owner of the problems, where there are several: each environment has its own orders."""
        if not problems:
            name = f"environment {environment!r}" if environment else "the environment"
            raise ValueError(f"{name} has no training problems")
        self._problems = problems
        # One step may span the end of a pass, and ordering a pass over millions of problems takes long.
        self._order = lru_cache(maxsize=2)(lambda epoch: epoch_order(len(problems), seed, epoch, environment))

    def problem(self, number: int) -> Problem:
        return self._problems[self.index(number)]

    def index(self, number: int) -> int:
        """Return the index of the problem that is visited after `number` others."""
        epoch, position = divmod(number, len(self._problems))
        return int(self._order(epoch)[position])


def epoch_order(count: int, seed: int, epoch: int, environment: str = "") -> NDArray[np.uint32]:
    """[count] order of [0, count) in pass `epoch`: indices sorted by 64-bit words of SHAKE256, little-endian."""
    purpose = ":".join(["mrl.epoch", str(seed), str(epoch), *filter(None, [environment])])
    sort_keys = np.frombuffer(shake_256(purpose.encode()).digest(8 * count), "<u8")
    return np.argsort(sort_keys, kind="stable").astype(np.uint32)  # stable: no library may order equal words its way


def split(weights: Sequence[float], total: int) -> list[int]:
    """Split `total` in proportion to positive weights; each part is at least 1.

    The largest remainders are rounded up, the first among equal ones. A part of 0 gets its 1 from the part furthest
    above its proportion. Example: weights 0.5, 0.3, 0.2 and total 4 give 2, 1, 1.

    Raises ValueError if `total` is less than the number of weights.
    """
    if total < len(weights):
        raise ValueError(f"{total} cannot be split into {len(weights)} parts")
    whole = sum(weights)
    exact = [weight / whole * total for weight in weights]
    parts = [int(share) for share in exact]
    by_remainder = sorted(range(len(parts)), key=lambda index: parts[index] - exact[index])
    for index in by_remainder[: total - sum(parts)]:
        parts[index] += 1
    while 0 in parts:
        giving = max((index for index, part in enumerate(parts) if part > 1), key=lambda i: parts[i] - exact[i])
        parts[giving] -= 1
        parts[parts.index(0)] += 1
    return parts


def interleaved(counts: Sequence[int]) -> list[tuple[int, int]]:
    """[sum(counts)] (part, number within the part), each part spread evenly over the list. Drivers have contiguous
    shares and environments take different times, so every driver should get some of each. Counts 4, 2: abaaba."""
    members = [(part, number) for part, count in enumerate(counts) for number in range(count)]
    return sorted(members, key=lambda member: ((2 * member[1] + 1) / counts[member[0]], member[0]))


def shares(start: int, count: int, drivers: int) -> list[range]:
    """Shares of the ordinals [start, start + count), one per rollout driver; sizes differ by at most 1. They are
    contiguous, unless there are fewer ordinals than drivers: then the drivers take turns."""
    if count < drivers:
        return [range(start + (driver - start) % drivers, start + count, drivers) for driver in range(drivers)]
    edges = [start + count * driver // drivers for driver in range(drivers + 1)]
    return [range(first, last) for first, last in pairwise(edges)]
