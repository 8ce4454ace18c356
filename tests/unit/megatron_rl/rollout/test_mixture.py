"""Several environments in one prompt stream: how each step is split, and whose problem every ordinal is."""

from __future__ import annotations

from collections import Counter

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.agent.api import TrainingSet
from megatron_rl.agent.trajectories import Problem
from megatron_rl.rollout.mixture import Mixture, interleaved, split
from megatron_rl.rollout.stream import PromptStream

weights = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6)


def training_set(name: str, weight: float, size: int) -> TrainingSet:
    return TrainingSet(name, weight, [Problem(f"{name} {number}", {}, name) for number in range(size)])


@given(weights, st.integers(0, 200))
def test_a_step_is_split_by_largest_remainder_and_everyone_gets_one(weights: list[float], more: int) -> None:
    total = len(weights) + more
    parts = split(weights, total)
    assert sum(parts) == total and min(parts) >= 1
    exact = [weight / sum(weights) * total for weight in weights]
    if min(exact) >= 1:
        assert all(abs(part - share) < 1 for part, share in zip(parts, exact, strict=True))


@pytest.mark.parametrize(
    ("weights", "total", "parts"),
    [
        ([1.0, 1.0], 5, [3, 2]),
        ([0.5, 0.3, 0.2], 4, [2, 1, 1]),
        ([2.0, 1.0], 32, [21, 11]),
        ([1.0, 1e-6], 32, [31, 1]),
        ([1.0, 1e-6, 1e-6], 3, [1, 1, 1]),
    ],
)
def test_for_example(weights: list[float], total: int, parts: list[int]) -> None:
    assert split(weights, total) == parts


@examples(30)
@given(
    st.lists(st.tuples(st.floats(0.1, 10.0), st.integers(1, 9)), min_size=1, max_size=4),
    st.integers(1, 8),
    st.integers(0, 99),
)
def test_each_environment_is_visited_in_passes_and_each_step_has_the_same_split(
    given_sets: list[tuple[float, int]], prompts: int, start: int
) -> None:
    """From any ordinal on, by a mixture that was never asked before: what a restart makes no difference to."""
    sets = [training_set(f"e{number}", weight, size) for number, (weight, size) in enumerate(given_sets)]
    seen = [Mixture(sets, 7, prompts).problem(ordinal) for ordinal in range(start + 60)]
    again = Mixture(sets, 7, prompts)
    assert [again.problem(ordinal) for ordinal in range(start, start + 60)] == seen[start:]
    turn = prompts * -(-len(sets) // prompts)
    for first in range(0, len(seen) - turn, turn):
        assert Counter(problem.environment for problem in seen[first : first + turn]) == Counter(
            problem.environment for problem in seen[:turn]
        )
    for each in sets:
        its = [problem for problem in seen if problem.environment == each.environment]
        passes = [its[at : at + len(each.problems)] for at in range(0, len(its), len(each.problems))]
        assert all(len({problem.prompt for problem in one}) == len(one) for one in passes)
        stream = PromptStream(each.problems, 7, each.environment)
        assert its == [stream.problem(number) for number in range(len(its))]


def test_one_environment_is_the_stream_it_is_without_a_mixture() -> None:
    one = training_set("", 1.0, 5)
    mixture, stream = Mixture([one], 3, 4), PromptStream(one.problems, 3)
    assert [mixture.problem(ordinal) for ordinal in range(20)] == [stream.problem(ordinal) for ordinal in range(20)]


def test_environments_take_turns_within_a_step() -> None:
    order = "".join("ab"[part] for part, _ in interleaved([4, 2]))
    assert order == "abaaba"


def test_an_environment_without_problems_is_named() -> None:
    with pytest.raises(ValueError, match="environment 'riddles' has no training problems"):
        Mixture([training_set("sums", 1.0, 3), training_set("riddles", 1.0, 0)], 0, 4)
