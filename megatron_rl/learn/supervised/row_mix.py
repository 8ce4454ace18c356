"""The rows of a run, one for each ordinal 0, 1, 2, ...: sets take turns by their weights, each in its own passes.

The turns are those of Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980): of m sets with
shares w, each has had k * w rows after k rows of the run, give or take 1 - 1 / (2m - 2) of a row. They depend on the
weights alone, in integers, so that any machine continues with the same row.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm

from megatron_rl.agent.api import TrainingSet
from megatron_rl.agent.trajectories import Problem
from megatron_rl.learn.rollout.stream import PromptStream


class RowMix:
    """Order of the rows of several sets, or of one."""

    def __init__(self, sets: Sequence[TrainingSet], seed: int, total: int | None = None) -> None:
        """
        total: rows of the whole run; None: as many as are asked for.

        Raises ValueError for a set without rows.
        """
        self.sets, self.total = sets, total
        self._streams = [PromptStream(each.problems, seed, each.environment) for each in sets]
        self._turns = Turns([each.weight for each in sets])

    def problem(self, ordinal: int) -> Problem:
        chosen, number = self._turns.place(ordinal)
        return self._streams[chosen].problem(number)

    def passes(self, rows: int) -> dict[str, float]:
        """Return the passes over each of several sets, by its id, that the first `rows` rows of the run are."""
        if len(self.sets) == 1:
            return {}
        counts = self._turns.counts(rows)
        return {each.environment: count / len(each.problems) for each, count in zip(self.sets, counts, strict=True)}


class Turns:
    """Turns of parts with these weights. Finding one takes time for each earlier one, unless those were found last."""

    def __init__(self, weights: Sequence[float]) -> None:
        """weights: positive; 0.1 means one tenth, not the binary number next to it."""
        exact = [Fraction(repr(weight)) for weight in weights]
        whole = lcm(*(each.denominator for each in exact))
        integers = [int(each * whole) for each in exact]
        shared = gcd(*integers)
        self._shares = [each // shared for each in integers]
        self._turn = 0
        self._counts: list[int] = []
        self._releases: list[int] = []
        self._deadlines: list[int] = []
        self._restart()

    def place(self, ordinal: int) -> tuple[int, int]:
        """Return the part of a turn, and how many earlier turns that part has."""
        counts = self.counts(ordinal)
        chosen = self._next(ordinal)
        return chosen, counts[chosen]

    def counts(self, turns: int) -> Sequence[int]:
        """Return how many of the first `turns` turns each part has."""
        if turns < self._turn:
            self._restart()
        counts, deadlines = self._counts, self._deadlines
        for turn in range(self._turn, turns):
            chosen = self._next(turn)
            counts[chosen] += 1
            self._releases[chosen], deadlines[chosen] = self._window(chosen)
        self._turn = max(self._turn, turns)
        return counts

    def _restart(self) -> None:
        self._turn, self._counts = 0, [0] * len(self._shares)
        windows = [self._window(part) for part in range(len(self._shares))]
        self._releases, self._deadlines = [first for first, _ in windows], [last for _, last in windows]

    def _next(self, turn: int) -> int:
        """Return the part whose turn it is: of those that may have it, the one whose turn is due first."""
        releases, best, due = self._releases, -1, 0
        for part, deadline in enumerate(self._deadlines):
            if releases[part] <= turn and (best < 0 or deadline < due):
                best, due = part, deadline
        return best

    # Of m parts, one with share w that has had x of k turns is k * w - x behind. No part may be more than
    # 1 - 1 / (2m - 2) behind or ahead. So its next turn, of number k counted from 1, comes at the earliest where
    # k * w - x >= 1 / (2m - 2), and at the latest one after the last where k * w - x <= 1 - 1 / (2m - 2). Example: two
    # parts with shares 3/4 and 1/4. The second may have turn 2 or 3: 2 * 1/4 >= 1/2, and 2 * 1/4 <= 1/2.
    def _window(self, part: int) -> tuple[int, int]:
        """Return the first and the last turn, from 0, at which a part may have its next one."""
        parts, whole, share, had = len(self._shares), sum(self._shares), self._shares[part], self._counts[part]
        if parts == 1:
            return had, had
        unit, scale = 2 * parts - 2, (2 * parts - 2) * share
        earliest = -(-(whole + unit * whole * had) // scale)
        latest = ((unit - 1) * whole + unit * whole * had) // scale + 1
        return earliest - 1, latest - 1
