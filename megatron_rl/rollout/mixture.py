"""The prompt stream of several sets at once: whose problem each ordinal 0, 1, 2, ... is, and which.

A function of the ordinal alone: a run that goes on in the middle has the mix that it would have had without the stop.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.agent.api import TrainingSet
from megatron_rl.agent.trajectories import Problem
from megatron_rl.rollout.stream import PromptStream


class Mixture:
    """Every step's prompts are split over the sets by their weights; each set is visited in passes of its own.

    A step with fewer prompts than there are sets cannot have one of each: then as many steps as it takes are split
    together. Dynamic sampling draws on, in the same order.
    """

    def __init__(self, sets: Sequence[TrainingSet], seed: int, prompts_per_step: int) -> None:
        """Raises ValueError for a set without problems."""
        self._streams = [PromptStream(each.problems, seed, each.environment) for each in sets]
        steps = -(-len(sets) // prompts_per_step)
        self._counts = split([each.weight for each in sets], steps * prompts_per_step)
        self._places = interleaved(self._counts)

    def problem(self, ordinal: int) -> Problem:
        turn, place = divmod(ordinal, len(self._places))
        chosen, number = self._places[place]
        return self._streams[chosen].problem(turn * self._counts[chosen] + number)


def split(weights: Sequence[float], total: int) -> list[int]:
    """Parts of `total` in proportion to positive weights: the largest remainders are rounded up, of equal ones the
    first; and each part is at least 1, at the cost of the one that is furthest above its proportion.

    Raises ValueError where `total` has not one for each.
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
    """(part, number in it) of sum(counts) places, each part spread evenly over all: drivers have contiguous shares, and
    tasks take differently long."""
    places = [(part, number) for part, count in enumerate(counts) for number in range(count)]
    return sorted(places, key=lambda place: ((2 * place[1] + 1) / counts[place[0]], place[0]))
