"""The window of ordinals that may be begun, and the choice of the next batch."""

from __future__ import annotations

from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.rollout.window import State, begun_below, choose, to_draw

UNFINISHED, OVERDUE, UNUSABLE, NO_SIGNAL, USABLE = State


class Simulated:
    """A run whose groups finish in an order given by the test."""

    def __init__(self, wanted: int, max_lag: int, rounds: int, drops: bool) -> None:
        self.wanted, self.max_lag, self.rounds, self.drops = wanted, max_lag, rounds, drops
        self.weights = 0  # the step after which they are the newest
        self.first = 0
        self.begun: dict[int, int] = {}  # ordinal: weights when it was begun
        self.finished: dict[int, State] = {}
        self.settled: list[int] = []
        self.trained: list[list[int]] = []

    def states(self) -> list[State]:
        return [self.state(ordinal) for ordinal in range(self.first, self.first + len(self.begun))]

    def state(self, ordinal: int) -> State:
        overdue = self.drops and self.begun[ordinal] <= self.weights - self.max_lag
        return self.finished.get(ordinal, OVERDUE if overdue else UNFINISHED)

    def begin(self, batches: int) -> None:
        below = begun_below(self.first, self.states(), batches, self.wanted, self.rounds)
        for ordinal in range(self.first + len(self.begun), below):
            self.begun[ordinal] = self.weights

    def collect(self) -> bool:
        """Train on the next batch if it is complete. Return whether it is."""
        self.begin(1 + self.max_lag)
        choice = choose(self.first, self.states(), self.wanted, self.rounds)
        if choice is None:
            return False
        gone = range(self.first, choice.next_ordinal)
        ages = [self.weights - self.begun[ordinal] for ordinal in choice.trained]
        assert all(age <= self.max_lag for age in ages)
        assert all(self.finished[ordinal] in (USABLE, NO_SIGNAL) for ordinal in choice.trained)
        assert {*choice.overdue} == {ordinal for ordinal in gone if ordinal not in self.finished}
        self.trained.append(choice.trained)
        self.settled += gone
        for ordinal in gone:
            del self.begun[ordinal]
        self.first = choice.next_ordinal
        self.begin(self.max_lag)
        possible = [each for each in self.states() if each not in (NO_SIGNAL, UNUSABLE)]
        assert len(possible) <= self.max_lag * self.wanted or self.rounds == 1
        return True


@examples(60)
@given(
    wanted=st.integers(1, 4),
    max_lag=st.integers(0, 3),
    rounds=st.sampled_from([1, 2, 8]),
    drops=st.booleans(),
    fates=st.lists(st.sampled_from([USABLE, USABLE, NO_SIGNAL, UNUSABLE]), min_size=1, max_size=20),
    picks=st.lists(st.integers(0, 50), min_size=1, max_size=60),
)
def test_every_ordinal_is_settled_once_and_no_token_is_older_than_the_bound(
    wanted: int, max_lag: int, rounds: int, drops: bool, fates: list[State], picks: list[int]
) -> None:
    run = Simulated(wanted, max_lag, rounds, drops)
    for pick in picks:
        while run.collect():
            run.weights += 1
        unfinished = [ordinal for ordinal in run.begun if ordinal not in run.finished]
        assert unfinished, "all that may be begun is finished, and there is no batch"
        ordinal = unfinished[pick % len(unfinished)]
        fate = fates[ordinal % len(fates)]
        run.finished[ordinal] = fate if rounds > 1 or fate is not NO_SIGNAL else USABLE
    assert run.settled == [*range(run.first)]
    trained = [ordinal for batch in run.trained for ordinal in batch]
    assert trained == sorted({*trained})
    assert all(len(batch) == wanted for batch in run.trained) or UNUSABLE in fates


def test_a_batch_is_the_first_ordinals_however_late_they_finish() -> None:
    assert choose(7, [USABLE, UNFINISHED, USABLE, USABLE], 2, rounds=1) is None
    found = choose(7, [USABLE, USABLE, USABLE, USABLE], 2, rounds=1)
    assert found is not None
    assert (found.trained, found.next_ordinal) == ([7, 8], 9)


def test_overdue_groups_are_dropped_once_others_can_replace_them() -> None:
    assert choose(0, [OVERDUE, USABLE, UNFINISHED], 2, rounds=1) is None
    found = choose(0, [OVERDUE, USABLE, USABLE], 2, rounds=1)
    assert found is not None
    assert (found.trained, found.overdue, found.next_ordinal) == ([1, 2], [0], 3)


def test_groups_without_signal_are_passed_over_until_the_last_round() -> None:
    states = [NO_SIGNAL, USABLE, NO_SIGNAL, UNUSABLE]
    assert begun_below(0, states, batches=1, wanted=2, rounds=8) == 5
    assert choose(0, states, 2, rounds=8) is None
    found = choose(0, states, 2, rounds=2)
    assert found is not None
    assert (found.trained, found.next_ordinal) == ([1, 2], 4)


def test_no_more_is_begun_for_groups_without_signal_than_the_rounds_allow() -> None:
    """Batch 1 settles ordinal 0 at least. Then two rounds of one prompt settle 1 and 2, with or without signal."""
    assert begun_below(0, [UNFINISHED, NO_SIGNAL, NO_SIGNAL, NO_SIGNAL], batches=2, wanted=1, rounds=2) == 3


def test_without_dynamic_sampling_a_prompt_that_is_too_long_is_not_replaced() -> None:
    assert begun_below(3, [UNUSABLE], batches=2, wanted=2, rounds=1) == 7
    found = choose(3, [UNUSABLE, USABLE], 2, rounds=1)
    assert found is not None
    assert (found.trained, found.next_ordinal) == ([4], 5)


def test_probably_enough_prompts_are_drawn_at_once() -> None:
    assert to_draw([], wanted=8, rounds=8, passed_over=0) == 8
    assert to_draw([], wanted=8, rounds=8, passed_over=8) == 16, "half of the last step's were usable"
    assert to_draw([USABLE, NO_SIGNAL, UNUSABLE] * 4, wanted=8, rounds=8, passed_over=8) == 10
    assert to_draw([NO_SIGNAL] * 60, wanted=8, rounds=99, passed_over=99) == 4 * 8, "at most 4 for each missing one"
    assert to_draw([NO_SIGNAL] * 60, wanted=8, rounds=8, passed_over=99) == 4, "none beyond the last round"
