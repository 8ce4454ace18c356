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
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import chain, repeat

from megatron_rl.recipe.config import RunConfig

MOST_FOR_ONE = 4  # largest number of prompts drawn at once for each prompt that is missing


class State(IntEnum):
    """State of an ordinal. If drivers report different states, the largest holds: those that do not own the ordinal
    report UNFINISHED."""

    UNFINISHED = 0
    OVERDUE = 1  # unfinished, though the next step is the last that may train on it; therefore dropped
    UNUSABLE = 2  # the prompt is too long
    NO_SIGNAL = 3  # all rewards are equal, and dynamic sampling draws another prompt instead
    USABLE = 4


@dataclass(frozen=True, slots=True)
class Drawn:
    """State of dynamic sampling between two steps. It is saved with the weights, so that an interrupted run draws the
    same prompts as an undisturbed one."""

    below: int = 0  # ordinal below which all are drawn. Those not settled yet are surplus groups of the next step
    passed_over: int = 0  # number of ordinals that the last step settled without training


NOTHING_DRAWN = Drawn()


@dataclass(frozen=True, slots=True)
class BatchChoice:
    trained: list[int]  # ordinals, ascending
    next_ordinal: int  # ordinal below which all are settled
    overdue: list[int]  # ordinals dropped because they are unfinished


@dataclass(frozen=True, slots=True)
class Window:
    """The ordinals of a driver between the last batch and what it may begin. Every change is a new window:

    window.at(first)                            the next batch begins there
    window.begun(window.surplus.stop)           a new driver first begins the surplus groups of an earlier one
    window.begun(window.open_below())           begin what may be begun; again, as states become known
    window.seen(states).choice()                the next batch, once it is complete
    window.taken(choice)                        its groups are taken; `open_below` then is that of the training step
    window.trained()                            the weights are those after one more step
    """

    wanted: int  # prompts per step
    rounds: int = 1
    """Largest number of batches drawn for one. Once `rounds * wanted` ordinals are finished, the last ones without
    signal fill the batch."""
    max_lag: int = 0
    drops: bool = False  # whether groups that are unfinished when they are needed are dropped, instead of waited for
    last: int = 2**62
    weights: int = 0  # step after which the present weights are the newest
    step: int = 1  # step of the next batch
    first: int = 0  # first ordinal of that batch
    below: int = 0  # ordinal below which all are begun
    states: tuple[State, ...] = ()  # last agreed states, from `first` on
    drawn: Drawn = NOTHING_DRAWN

    @classmethod
    def of(cls, config: RunConfig, step: int = 0, drawn: Drawn = NOTHING_DRAWN) -> Window:
        """Return the window of a new driver after this step, with the state of dynamic sampling after it."""
        ahead, filters = config.asynchronous, any(each.dynamic_sampling.enabled for each in config.algorithms.each)
        return cls(
            wanted=config.grpo.prompts_per_step,
            rounds=config.grpo.dynamic_sampling.max_rounds if filters else 1,
            max_lag=ahead.max_lag,
            drops=ahead.max_lag > 0 and ahead.on_overdue == "drop",
            last=config.training.steps,
            weights=step,
            step=step + 1,
            drawn=drawn,
        )

    @property
    def ahead(self) -> bool:
        """Whether groups of further batches are generated while a step trains."""
        return self.max_lag > 0

    @property
    def surplus(self) -> range:
        """Ordinals that an earlier driver has drawn and this one has not begun."""
        return range(self.below, max(self.below, self.drawn.below))

    @property
    def needed(self) -> range:
        """Ordinals on which the next batch depends."""
        if self.ahead:
            return range(self.first, self.end_of(1))
        return range(self.first, self.below)  # all that are drawn: no result may depend on which finishes first

    @property
    def overdue_after(self) -> int | None:
        """Step whose weights make an unfinished group overdue if they, or older ones, were the newest when it was
        begun; None: no group is."""
        return self.weights - self.max_lag if self.drops else None

    def open_below(self) -> int:
        """Return the ordinal below which groups may be begun with the present weights."""
        if not self.ahead:
            return self.below + self._to_draw()
        # The window spans the batches that these weights may still sample. Example with max_lag 1, weights after step
        # 7: before step 8 trains, the batches of steps 8 and 9; once the batch of step 8 is taken (`step` is 9), only
        # that of step 9, until the weights are those after step 8. Nothing is begun for a step after the last one,
        # except that a batch which is asked for is always begun.
        further = max(0, min(self.weights + 1 + self.max_lag, self.last) - self.weights - 1)
        return max(self.below, self.end_of(further + (self.step == self.weights + 1)))

    def end_of(self, batches: int) -> int:
        """Return the ordinal below which groups may be begun for this many batches from `first` on.

        Unfinished groups count as usable: if more turn out to be without signal, the batches only reach further. So
        whatever the states become, all ordinals below are settled by these batches.
        """
        below = self.first
        upcoming = chain(self.states, repeat(State.USABLE))
        for _ in range(batches):
            usable = seen = 0
            while usable < self.wanted and seen < self.rounds * self.wanted:
                usable += next(upcoming) not in (State.NO_SIGNAL, State.UNUSABLE)
                seen += 1
            below += seen
        return below

    def _to_draw(self) -> int:
        """Return how many groups to draw for the next batch in one more round, so that probably no more are needed; 0
        while those of the last round are unfinished, or if the batch is complete.

        The usable share is estimated from this step and the last one together. Example: 8 are wanted and the last step
        passed over 8, so half of its ordinals were usable: 16 are drawn.
        """
        if len(self.states) < self.below - self.first or State.UNFINISHED in self.states:
            return 0
        usable, finished = self.states.count(State.USABLE), len(self.states)
        missing = self.wanted - usable
        seen = finished + self.wanted + self.drawn.passed_over
        expected = -(-missing * seen // (usable + self.wanted))  # rounded up
        return max(0, min(expected, MOST_FOR_ONE * missing, self.rounds * self.wanted - finished))

    def at(self, first: int) -> Window:
        return replace(self, first=first, below=max(self.below, first))

    def begun(self, below: int) -> Window:
        return replace(self, below=below)

    def seen(self, states: Sequence[State]) -> Window:
        """Note the states of all begun ordinals from `first` on."""
        return replace(self, states=tuple(states))

    def choice(self) -> BatchChoice | None:
        """Return the next batch, the first `wanted` usable ordinals; None until it is complete."""
        usable: list[int] = []
        without_signal: list[int] = []
        overdue: list[int] = []
        seen = 0
        for ordinal, state in enumerate(self.states, self.first):
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
            if len(usable) == self.wanted or seen == self.rounds * self.wanted:
                missing = self.wanted - len(usable)
                stand_ins = without_signal[-missing:] if missing else []
                return BatchChoice(sorted(usable + stand_ins), ordinal + 1, overdue)
        return None

    def taken(self, choice: BatchChoice) -> Window:
        """Move on to the next batch."""
        settled = choice.next_ordinal - self.first
        drawn = self.drawn if self.ahead else Drawn(self.below, passed_over=settled - len(choice.trained))
        return replace(self, step=self.step + 1, first=choice.next_ordinal, states=self.states[settled:], drawn=drawn)

    def trained(self) -> Window:
        return replace(self, weights=self.weights + 1)
