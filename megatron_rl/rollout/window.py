"""The window of ordinals that a driver may begin, and the choice of the next batch. Pure.

Prompts are trained on in the order of the stream, however long their answers take. So a batch favours neither short
answers nor easy prompts, and a checkpoint describes all settled prompts by one ordinal.

If generation runs ahead of training, this order also bounds the age of every token. While the weights are those after
step w, prompts are begun only for the batches of steps w + 1 ... w + 1 + max_lag, each of prompts_per_step prompts that
may be trained on. A prompt begun then is trained on by step w + 1 + max_lag, which starts from the weights after step
w + max_lag. Example: with max_lag 1, a prompt begun with the weights after step 7 is trained on in step 9 at the
latest, which starts from the weights after step 8.

In the terms of Megatron-RL's pipeline, both the submission and the consumption unit are the batch, with one difference:
if dynamic sampling passes over a prompt, another one is begun at once, as with the group as the unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain, repeat

MOST_FOR_ONE = 4
"""Largest number of prompts drawn at once for each prompt that is missing."""


class State(IntEnum):
    """State of an ordinal. If drivers report different states, the largest holds: those that do not own the ordinal
    report UNFINISHED."""

    UNFINISHED = 0
    OVERDUE = 1
    """Unfinished, though the next step is the last that may train on it; therefore dropped."""
    UNUSABLE = 2
    """The prompt is too long."""
    NO_SIGNAL = 3
    """All rewards are equal, and dynamic sampling draws another prompt instead."""
    USABLE = 4


@dataclass(frozen=True, slots=True)
class Drawn:
    """State of dynamic sampling between two steps. It is saved with the weights, so that an interrupted run draws the
    same prompts as an undisturbed one."""

    below: int = 0
    """Ordinal below which all are drawn. Those not settled yet are surplus groups of the next step."""
    passed_over: int = 0
    """Number of ordinals that the last step settled without training."""


NOTHING_DRAWN = Drawn()


@dataclass(frozen=True, slots=True)
class Choice:
    """The batch of a step."""

    trained: list[int]
    """Ordinals, ascending."""
    next_ordinal: int
    """Ordinal below which all are settled."""
    overdue: list[int]
    """Ordinals dropped because they are unfinished."""


def choose(first: int, states: Sequence[State], wanted: int, rounds: int) -> Choice | None:
    """Return the next batch, the first `wanted` usable ordinals; None until it is complete.

    Args:
        first: ordinal of the first state.
        wanted: prompts per step.
        rounds: largest number of batches drawn for one. Once `rounds * wanted` ordinals are finished, the last ones
            without signal fill the batch.
    """
    usable: list[int] = []
    without_signal: list[int] = []
    overdue: list[int] = []
    seen = 0
    for ordinal, state in enumerate(states, first):
        if state is State.UNFINISHED:
            return None
        if state is State.OVERDUE:
            overdue.append(ordinal)
            continue
        seen += 1
        if state is State.USABLE:
            usable.append(ordinal)
        elif state is State.NO_SIGNAL:
            without_signal.append(ordinal)
        if len(usable) == wanted or seen == rounds * wanted:
            missing = wanted - len(usable)
            stand_ins = without_signal[-missing:] if missing else []
            return Choice(sorted(usable + stand_ins), ordinal + 1, overdue)
    return None


def to_draw(states: Sequence[State], wanted: int, rounds: int, passed_over: int) -> int:
    """Return how many further ordinals to draw at once so that probably no more are needed; 0 or less if the batch is
    complete. The usable share is estimated from this step and the last one together.

    Example: 8 are wanted and the last step passed over 8, so half of its ordinals were usable: 16 are drawn.

    Args:
        states: states of the ordinals drawn so far, all finished.
        wanted, rounds: as for `choose`.
        passed_over: ordinals that the last step settled without training.
    """
    usable = states.count(State.USABLE)
    missing = wanted - usable
    expected = -(-missing * (len(states) + wanted + passed_over) // (usable + wanted))  # rounded up
    return min(expected, MOST_FOR_ONE * missing, rounds * wanted - len(states))


def begun_below(first: int, states: Sequence[State], batches: int, wanted: int, rounds: int) -> int:
    """Return the ordinal below which prompts may be begun for this many batches from `first` on.

    Unfinished groups count as usable: if more turn out to be without signal, the batches only reach further. So
    whatever the states become, all ordinals below are settled by these batches.
    """
    below = first
    upcoming = chain(states, repeat(State.USABLE))
    for _ in range(batches):
        usable = seen = 0
        while usable < wanted and seen < rounds * wanted:
            usable += next(upcoming) not in (State.NO_SIGNAL, State.UNUSABLE)
            seen += 1
        below += seen
    return below
