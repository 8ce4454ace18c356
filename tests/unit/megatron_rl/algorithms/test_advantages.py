"""Advantages compare the answers of one group, in fp32, and are 0 without signal."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.algorithms.advantages import batch_advantages, group_advantages

STDS = ["population", "sample", "none"]
FINITE = st.floats(-100, 100, width=32)
SIXTEENTHS = st.integers(-64, 64).map(lambda n: n / 16)
"""Rewards whose sums and differences fp32 holds exactly."""


def batches(reward):
    """(rewards, group of each, number of groups): ragged groups in any order, some of them empty."""
    member = st.tuples(reward, st.integers(0, 4))
    return st.lists(member, min_size=1, max_size=24).map(lambda rows: (*map(list, zip(*rows, strict=True)), 5))


def tensors(rewards, group):
    return torch.tensor(rewards, dtype=torch.float32), torch.tensor(group)


def over_answers(rewards, *, std):
    return batch_advantages(rewards, torch.ones(len(rewards), dtype=torch.long), std=std)


@pytest.mark.parametrize("large", [1e6, -1e6, 1e9])
def test_large_rewards_are_compared_before_they_are_rounded(large):
    rewards, group = torch.tensor([large, large + abs(large) / 1e6], dtype=torch.float64), torch.tensor([0, 0])
    divided = group_advantages(rewards, group, 1, std="sample")
    torch.testing.assert_close(divided, torch.tensor([-(0.5**0.5), 0.5**0.5]), rtol=2e-4, atol=0)


@given(batches(SIXTEENTHS), st.integers(-1000, 1000), st.sampled_from(STDS))
def test_constant_added_to_all_rewards_changes_no_bit(batch, shift, std):
    rewards, group, num_groups = batch
    rewards, group = tensors(rewards, group)
    before = group_advantages(rewards, group, num_groups, std=std)
    after = group_advantages(rewards + shift, group, num_groups, std=std)
    assert torch.equal(before, after)


@given(FINITE, st.integers(1, 64), st.sampled_from(STDS))
def test_equal_rewards_give_exactly_zero(reward, size, std):
    rewards, group = tensors([reward] * size, [0] * size)
    assert group_advantages(rewards, group, 1, std=std).tolist() == [0.0] * size


@pytest.mark.parametrize("std", STDS)
def test_rewards_that_differ_only_by_rounding_give_exactly_zero(std):
    """Rewards may be sums in different orders: divided by its own spread, their rounding would look like a real
    difference."""
    one = torch.tensor(100 / 3)
    rewards = torch.stack([one, torch.nextafter(one, one + 1), one])
    group = torch.zeros(3, dtype=torch.int64)
    assert rewards.unique().numel() == 2
    assert group_advantages(rewards, group, 1, std=std).tolist() == [0.0] * 3
    assert over_answers(rewards, std=std).tolist() == [0.0] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_advantages_are_fp32_for_every_reward_type(dtype):
    rewards = torch.tensor([1, 0, 0], dtype=dtype)
    advantages = group_advantages(rewards, torch.zeros(3, dtype=torch.int64), 1, std="none")
    assert advantages.dtype == torch.float32
    torch.testing.assert_close(advantages, torch.tensor([2 / 3, -1 / 3, -1 / 3]))


def test_no_rollouts_give_no_advantages():
    rewards, group = tensors([], [])
    assert group_advantages(rewards, group.long(), 0, std="population").shape == (0,)


def test_group_index_out_of_range_is_rejected():
    rewards, group = tensors([1, 0], [0, 1])
    with pytest.raises(RuntimeError, match="out of bounds"):
        group_advantages(rewards, group, 1, std="population")
