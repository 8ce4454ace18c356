"""A group has signal if the rewards of its advantages differ by more than rounding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.algorithms.advantages import group_advantages
from megatron_rl.algorithms.rewards import SIGNAL_SPREAD, has_signal
from megatron_rl.recipe.grpo import AdvantageStd


def signal(*rewards: list[float]) -> list[bool]:
    index = [number for number, of_group in enumerate(rewards) for _ in of_group]
    values = [reward for of_group in rewards for reward in of_group]
    return has_signal(torch.tensor(values), torch.tensor(index), len(rewards)).tolist()


def test_equal_rewards_have_no_signal_however_large() -> None:
    assert signal([0.0] * 4, [100.1] * 16, [-1e6 / 3] * 7, [5.0], []) == [False] * 5


def test_threshold_is_a_share_of_the_largest_reward() -> None:
    above, below = 1 + 3 * SIGNAL_SPREAD, 1 + SIGNAL_SPREAD / 3
    for size in (1e-3, 1.0, 1e4):
        assert signal([size, size * above], [-size, -size * above], [size, size * below]) == [True, True, False]


@pytest.mark.parametrize("std", ["population", "sample", "none"])
@given(rewards=st.lists(st.floats(-100, 100, width=16), min_size=1, max_size=6), offset=st.integers(-10_000, 10_000))
def test_advantages_are_nonzero_only_with_signal(std: AdvantageStd, rewards: list[float], offset: float) -> None:
    one = torch.tensor(rewards) + offset
    group = torch.zeros(len(rewards), dtype=torch.long)
    advantages = group_advantages(one, group, 1, std=std)
    assert bool(advantages.any()) == bool(has_signal(one, group, 1))
