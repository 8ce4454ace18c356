"""A group has signal if the rewards of its advantages differ by more than rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from core_helpers import trajectory
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.agent.trajectories import Problem, TrajectoryGroup
from megatron_rl.algorithms.advantages import group_advantages
from megatron_rl.algorithms.config import OverlongConfig
from megatron_rl.algorithms.signal import SIGNAL_SPREAD, group_rewards, has_signal

NONE = OverlongConfig()
PENALTY = OverlongConfig(mode="penalty", buffer=4, penalty=1.0)


def groups(*rewards: list[float], lengths: list[int] | None = None) -> list[TrajectoryGroup]:
    made = []
    for ordinal, of_group in enumerate(rewards):
        answers = [trajectory([1], [2] * length, r) for r, length in zip(of_group, lengths or [3] * 99, strict=False)]
        made.append(TrajectoryGroup(ordinal, Problem("", {}), answers, {}))
    return made


def signal(of: list[TrajectoryGroup], overlong: OverlongConfig = NONE) -> list[bool]:
    rewards = group_rewards(of, 8, overlong)
    return has_signal(rewards.shaped, rewards.group, len(of)).tolist()


def test_equal_rewards_have_no_signal_however_large() -> None:
    assert signal(groups([0.0] * 4, [100.1] * 16, [-1e6 / 3] * 7, [5.0], [])) == [False] * 5


def test_threshold_is_a_share_of_the_largest_reward() -> None:
    above, below = 1 + 3 * SIGNAL_SPREAD, 1 + SIGNAL_SPREAD / 3
    for size in (1e-3, 1.0, 1e4):
        assert signal(groups([size, size * above], [-size, -size * above], [size, size * below])) == [True, True, False]


def test_penalty_can_create_and_remove_signal() -> None:
    equal, unequal = groups([1.0, 1.0], lengths=[3, 8]), groups([1.0, 0.5], lengths=[6, 4])
    assert signal(equal) == [False] and signal(equal, PENALTY) == [True]
    assert signal(unequal) == [True] and signal(unequal, PENALTY) == [False]


def test_penalty_depends_on_the_last_turn() -> None:
    (group,) = groups([1.0, 1.0], lengths=[8, 8])
    first, second = group.trajectories
    tokens = [1, *[2] * 7, 9, 2]
    turns = [range(1, 8), range(9, 10)]
    several = replace(first, tokens=tokens, loss_mask=[False] * 10, logprobs=[0.0] * 10, versions=[0] * 10, turns=turns)
    mixed = TrajectoryGroup(0, group.problem, [several, second], {})
    assert group_rewards([mixed], 8, PENALTY).shaped.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("divide_by_std", [True, False])
@given(rewards=st.lists(st.floats(-100, 100, width=16), min_size=1, max_size=6), offset=st.integers(-10_000, 10_000))
def test_advantages_are_nonzero_only_with_signal(divide_by_std: bool, rewards: list[float], offset: float) -> None:
    one = torch.tensor(rewards) + offset
    group = torch.zeros(len(rewards), dtype=torch.long)
    advantages = group_advantages(one, group, 1, divide_by_std=divide_by_std)
    assert bool(advantages.any()) == bool(has_signal(one, group, 1))
