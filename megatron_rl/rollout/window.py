"""Which prompts may be begun, and which make the next batch. Pure.

Prompts are trained on in the order of the stream, however long their answers take: so a step's batch leans neither to
short answers nor to easy prompts, and an ordinal is all that a checkpoint needs to know of what is settled.

Where generation runs ahead of training, that bounds the age of every token too. While the weights are those after step
w, prompts are begun only as far as the batches of steps w + 1 ... w + 1 + max_lag reach, each of prompts_per_step that
may be trained on. What is begun then is trained on by step w + 1 + max_lag, whose weights before it are those after
step w + max_lag.

In the terms of Megatron-RL's pipeline both the submission and the consumption unit are the batch; but for a prompt that
dynamic sampling passes over another one is begun at once, as with the group as unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

MOST_FOR_ONE = 4
"""Prompts that are drawn at once for one that is missing, at most."""


class State(IntEnum):
    """What is known of an ordinal. Of the states that drivers know, the largest holds."""

    UNFINISHED = 0
    OVERDUE = 1
    """Not finished, though it may be trained on in the next step at the latest, and dropped for that."""
    UNUSABLE = 2
    """Its prompt is too long."""
    NO_SIGNAL = 3
    """Its rewards are all equal, and dynamic sampling draws another one for it."""
    USABLE = 4


@dataclass(frozen=True, slots=True)
class Drawn:
    """What dynamic sampling has left for the next step. It is saved with the weights: what is drawn next follows from
    it, and an interrupted run is to draw the same."""

    below: int = 0
    """All ordinals below it are drawn; those that are not settled are answered, and wait for that step."""
    passed_over: int = 0
    """Ordinals that the last step settled without training."""


NOTHING_DRAWN = Drawn()


@dataclass(frozen=True, slots=True)
class Choice:
    """The batch of a step."""

    trained: list[int]
    """Ordinals, ascending."""
    next_ordinal: int
    """All below it are settled."""
    overdue: list[int]
    """Those dropped because they are not finished."""


def choose(first: int, states: Sequence[State], wanted: int, rounds: int) -> Choice | None:
    """The next batch: the first `wanted` usable ordinals; None where it has to be waited for.

    Args:
        first: ordinal of the first state.
        rounds: of as many times `wanted` ordinals none is passed over any more: the last ones without signal stand in.
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
    """How many further ordinals to draw at once where the batch is not complete, so that probably no more are needed:
    the share that is usable is taken to be that of this step and the last one together.

    Args:
        states: known ones, all finished.
        wanted, rounds: see `choose`.
        passed_over: see `Drawn`.
    """
    usable = states.count(State.USABLE)
    missing = wanted - usable
    seen, of_use = len(states) + wanted + passed_over, usable + wanted
    expected = -(-missing * seen // of_use)
    return min(expected, MOST_FOR_ONE * missing, rounds * wanted - len(states))


def begun_below(first: int, states: Sequence[State], batches: int, wanted: int, rounds: int) -> int:
    """The ordinal below which prompts may be begun, for that many batches from `first` on: others take the place of
    those that are known to be of no use, where there are further rounds."""
    passed_over = sum(state in (State.NO_SIGNAL, State.UNUSABLE) for state in states) if rounds > 1 else 0
    return first + batches * wanted + passed_over
