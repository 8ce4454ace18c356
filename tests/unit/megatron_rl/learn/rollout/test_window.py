"""The window of ordinals that may be begun, and the choice of the next batch."""

from __future__ import annotations

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.learn.rollout.window import BatchChoice, Drawn, State, Window

UNFINISHED, OVERDUE, UNUSABLE, NO_SIGNAL, USABLE = State


class Simulated:
    """A run whose groups finish in an order given by the test."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.begun: dict[int, int] = {}  # ordinal: weights when it was begun
        self.finished: dict[int, State] = {}
        self.settled: list[int] = []
        self.trained: list[list[int]] = []

    def look(self) -> None:
        after = self.window.overdue_after

        def state(ordinal: int) -> State:
            overdue = after is not None and self.begun[ordinal] <= after
            return self.finished.get(ordinal, OVERDUE if overdue else UNFINISHED)

        self.window = self.window.seen([*map(state, range(self.window.first, self.window.below))])

    def begin(self) -> None:
        for ordinal in range(self.window.below, below := self.window.open_below()):
            self.begun[ordinal] = self.window.weights
        self.window = self.window.begun(below)

    def collect(self) -> bool:
        """Train on the next batch if it is complete. Return whether it is."""
        self.look()
        self.begin()
        self.look()
        choice = self.window.choice()
        if choice is None:
            return False
        gone = range(self.window.first, choice.next_ordinal)
        oldest = max((self.window.weights - self.begun[ordinal] for ordinal in choice.trained), default=0)
        carries = self.window.rounds > 1 and not self.window.ahead  # surplus groups into the next step
        assert oldest <= self.window.max_lag or carries
        assert all(self.finished[ordinal] in (USABLE, NO_SIGNAL) for ordinal in choice.trained)
        assert {*choice.overdue} == {ordinal for ordinal in gone if ordinal not in self.finished}
        self.trained.append(choice.trained)
        self.settled += gone
        self.window = self.window.taken(choice)
        if self.window.ahead:
            self.begin()
            possible = [each for each in self.window.states if each not in (NO_SIGNAL, UNUSABLE)]
            assert len(possible) <= self.window.max_lag * self.window.wanted or self.window.rounds == 1
        self.window = self.window.trained()
        return True

    def finish(self, fates: list[State], pick: int) -> None:
        unfinished = [ordinal for ordinal in self.begun if ordinal not in {*self.finished, *self.settled}]
        assert unfinished, "all that may be begun is finished, and there is no batch"
        ordinal = unfinished[pick % len(unfinished)]
        fate = fates[ordinal % len(fates)]
        self.finished[ordinal] = fate if self.window.rounds > 1 or fate is not NO_SIGNAL else USABLE


FATES = st.lists(st.sampled_from([USABLE, USABLE, NO_SIGNAL, UNUSABLE]), min_size=1, max_size=20)


@examples(60)
@given(
    wanted=st.integers(1, 4),
    max_lag=st.integers(0, 3),
    rounds=st.sampled_from([1, 2, 8]),
    drops=st.booleans(),
    fates=FATES,
    picks=st.lists(st.integers(0, 50), min_size=1, max_size=60),
)
def test_every_ordinal_is_settled_once_and_no_token_is_older_than_the_bound(
    wanted: int, max_lag: int, rounds: int, drops: bool, fates: list[State], picks: list[int]
) -> None:
    run = Simulated(Window(wanted, rounds, max_lag, drops and max_lag > 0))
    for pick in picks:
        while run.collect():
            pass
        run.finish(fates, pick)
    assert run.settled == [*range(run.window.first)]
    trained = [ordinal for batch in run.trained for ordinal in batch]
    assert trained == sorted({*trained})
    assert all(len(batch) == wanted for batch in run.trained) or UNUSABLE in fates


@examples(40)
@given(wanted=st.integers(1, 4), rounds=st.sampled_from([1, 2, 8]), fates=FATES, at=st.integers(1, 5))
def test_a_new_driver_draws_what_the_earlier_one_would_have_drawn(
    wanted: int, rounds: int, fates: list[State], at: int
) -> None:
    """Without generation ahead, which groups are drawn depends on no time, and a driver that resumes after a step has
    the surplus groups of the earlier one."""

    def run(resumed_after: int | None) -> Simulated:
        made = Simulated(Window(wanted, rounds))
        while len(made.trained) < 7:
            while made.collect():
                if len(made.trained) == resumed_after:
                    old = made.window
                    made.window = Window(wanted, rounds, weights=at, step=at + 1, drawn=old.drawn).at(old.first)
                    made.window = made.window.begun(made.window.surplus.stop)
                    assert made.window.below == old.below
            made.finish(fates, 0)
        return made

    undisturbed, resumed = run(None), run(at)
    assert resumed.trained[:7] == undisturbed.trained[:7]
    assert resumed.begun == undisturbed.begun


@pytest.mark.parametrize("max_lag", [1, 2, 5])
def test_nothing_is_begun_for_steps_after_the_last(max_lag: int) -> None:
    run = Simulated(Window(2, max_lag=max_lag, last=3))
    while len(run.trained) < 3:
        if not run.collect():
            run.finish([USABLE], 0)
    assert [*run.begun] == [*range(6)]


def choice(first: int, states: list[State], wanted: int, *, rounds: int) -> BatchChoice | None:
    return Window(wanted, rounds, first=first, states=(*states,)).choice()


def drawn_at_once(states: list[State], *, rounds: int, passed_over: int) -> int:
    """Further groups that a driver draws when 8 are wanted and these are finished."""
    window = Window(8, rounds, below=len(states), states=(*states,), drawn=Drawn(passed_over=passed_over))
    return window.open_below() - window.below


def test_groups_without_signal_are_passed_over_until_the_last_round() -> None:
    states = [NO_SIGNAL, USABLE, NO_SIGNAL, UNUSABLE]
    assert Window(2, 8, states=(*states,)).end_of(1) == 5
    assert choice(0, states, 2, rounds=8) is None
    found = choice(0, states, 2, rounds=2)
    assert found is not None
    assert (found.trained, found.next_ordinal) == ([1, 2], 4)


def test_no_more_is_begun_for_groups_without_signal_than_the_rounds_allow() -> None:
    """Batch 1 settles ordinal 0 at least. Then two rounds of one prompt settle 1 and 2, with or without signal."""
    assert Window(1, 2, states=(UNFINISHED, NO_SIGNAL, NO_SIGNAL, NO_SIGNAL)).end_of(2) == 3


def test_without_dynamic_sampling_a_prompt_that_is_too_long_is_not_replaced() -> None:
    assert Window(2, first=3, states=(UNUSABLE,)).end_of(2) == 7
    found = choice(3, [UNUSABLE, USABLE], 2, rounds=1)
    assert found is not None
    assert (found.trained, found.next_ordinal) == ([4], 5)


def test_probably_enough_prompts_are_drawn_at_once() -> None:
    assert drawn_at_once([], rounds=8, passed_over=0) == 8
    assert drawn_at_once([], rounds=8, passed_over=8) == 16, "half of the last step's were usable"
    assert drawn_at_once([USABLE, NO_SIGNAL, UNUSABLE] * 4, rounds=8, passed_over=8) == 10
    assert drawn_at_once([NO_SIGNAL] * 60, rounds=99, passed_over=99) == 4 * 8, "at most 4 for each missing one"
    assert drawn_at_once([NO_SIGNAL] * 60, rounds=8, passed_over=99) == 4, "none beyond the last round"
