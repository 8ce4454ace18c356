"""Pairs of answers: the best against the worst, and none if all rewards are equal."""

from __future__ import annotations

import pytest
from core_helpers import trajectory

from megatron_rl.agent.trajectories import ContrastivePair, Problem, TrajectoryGroup, contrastive_pair

PROBLEM = Problem("7=", {})


def group(*rewards: float) -> TrajectoryGroup:
    return TrajectoryGroup(0, PROBLEM, [trajectory([1], [number], reward) for number, reward in enumerate(rewards)], {})


def test_best_answer_is_chosen_over_the_worst() -> None:
    made = group(0.5, 1.0, 0.0, 1.0, 0.0)
    assert contrastive_pair(made) == ContrastivePair(PROBLEM, made.trajectories[1], made.trajectories[2])


@pytest.mark.parametrize("rewards", [(), (1.0,), (0.5, 0.5)])
def test_equal_rewards_make_no_pair(rewards: tuple[float, ...]) -> None:
    assert contrastive_pair(group(*rewards)) is None


def test_reversed_pair_is_rejected() -> None:
    with pytest.raises(ValueError, match="the chosen answer has reward 0, the rejected one 1"):
        ContrastivePair(PROBLEM, trajectory([1], [2], 0.0), trajectory([1], [3], 1.0))
