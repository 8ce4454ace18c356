"""Advantages compare the answers of one group, in fp32, and are 0 without signal."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.algorithms.advantages import STD_EPSILON, batch_advantages, group_advantages

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


def by_hand(rewards, group, std):
    """The definition, one Python float at a time."""
    advantages = []
    for reward, index in zip(rewards, group, strict=True):
        members = [other for other, its in zip(rewards, group, strict=True) if its == index]
        mean = math.fsum(members) / len(members)
        count = max(1, len(members) - (std == "sample"))
        spread = math.sqrt(math.fsum((member - mean) ** 2 for member in members) / count)
        advantages.append((reward - mean) / (1e-4 + spread) if std != "none" else reward - mean)
    return advantages


def test_advantages_with_half_of_the_answers_right():
    rewards, group = tensors([1, 0, 0, 1], [0, 0, 0, 0])
    expected = torch.tensor([1, -1, -1, 1]) * 0.5
    torch.testing.assert_close(group_advantages(rewards, group, 1, std="none"), expected)
    torch.testing.assert_close(group_advantages(rewards, group, 1, std="population"), expected / 0.5001)


@pytest.mark.parametrize("large", [1e6, -1e6, 1e9])
def test_large_rewards_are_compared_before_they_are_rounded(large):
    rewards, group = torch.tensor([large, large + abs(large) / 1e6], dtype=torch.float64), torch.tensor([0, 0])
    divided = group_advantages(rewards, group, 1, std="sample")
    torch.testing.assert_close(divided, torch.tensor([-(0.5**0.5), 0.5**0.5]), rtol=2e-4, atol=0)


def test_rewards_that_differ_by_rounding_in_fp32_have_no_signal():
    rewards = torch.tensor([0.1, 0.1 * (1 + 2**-22)], dtype=torch.float64)
    assert group_advantages(rewards, torch.tensor([0, 0]), 1, std="sample").tolist() == [0, 0]


def test_groups_may_be_ragged_and_interleaved():
    rewards, group = tensors([3, 10, 0, 20, 0], [0, 2, 0, 2, 0])
    advantages = group_advantages(rewards, group, 3, std="none")
    assert advantages.tolist() == [2, -5, -1, 5, -1]


@given(batches(SIXTEENTHS), st.sampled_from(STDS))
def test_equals_the_definition_in_float64(batch, std):
    rewards, group, num_groups = batch
    advantages = group_advantages(*tensors(rewards, group), num_groups, std=std)
    assert advantages.tolist() == pytest.approx(by_hand(rewards, group, std), rel=1e-5, abs=1e-5)


@given(batches(FINITE), st.sampled_from(STDS))
def test_every_group_sums_to_zero(batch, std):
    rewards, group, num_groups = batch
    rewards, group = tensors(rewards, group)
    advantages = group_advantages(rewards, group, num_groups, std=std)
    sums = torch.zeros(num_groups).index_add(0, group, advantages)
    magnitude = torch.zeros(num_groups).index_add(0, group, advantages.abs())
    assert (sums.abs() <= 1e-5 * magnitude.clamp(min=1e-6)).all()


@given(batches(SIXTEENTHS), st.integers(-1000, 1000), st.sampled_from(STDS))
def test_constant_added_to_all_rewards_changes_no_bit(batch, shift, std):
    rewards, group, num_groups = batch
    rewards, group = tensors(rewards, group)
    before = group_advantages(rewards, group, num_groups, std=std)
    after = group_advantages(rewards + shift, group, num_groups, std=std)
    assert torch.equal(before, after)


@given(batches(SIXTEENTHS), st.sampled_from([2.0, 8.0, 1024.0]))
def test_with_std_the_scale_of_rewards_matters_only_through_epsilon(batch, scale):
    rewards, group, num_groups = batch
    rewards, group = tensors(rewards, group)
    small = group_advantages(rewards, group, num_groups, std="population")
    large = group_advantages(rewards * scale, group, num_groups, std="population")
    std = torch.stack([rewards[group == its].float().std(correction=0) for its in group])
    bound = torch.where(std > 0, small.abs() * (STD_EPSILON / std.clamp(min=1e-9) + 1e-5), 0)
    assert ((large - small).abs() <= bound).all()


@given(batches(SIXTEENTHS), st.sampled_from([0.5, 4.0, 256.0]))
def test_without_std_advantages_scale_with_the_rewards(batch, scale):
    rewards, group, num_groups = batch
    rewards, group = tensors(rewards, group)
    advantages = group_advantages(rewards, group, num_groups, std="none")
    scaled = group_advantages(rewards * scale, group, num_groups, std="none")
    assert torch.equal(scaled, advantages * scale)


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


def test_std_is_the_population_std():
    rewards, group = tensors([1, 3, 7], [0, 0, 2])
    expected = torch.tensor([-1, 1, 0]) / (1 + STD_EPSILON)
    torch.testing.assert_close(group_advantages(rewards, group, 4, std="population"), expected)


def test_no_rollouts_give_no_advantages():
    rewards, group = tensors([], [])
    assert group_advantages(rewards, group.long(), 0, std="population").shape == (0,)


def test_group_index_out_of_range_is_rejected():
    rewards, group = tensors([1, 0], [0, 1])
    with pytest.raises(RuntimeError, match="out of bounds"):
        group_advantages(rewards, group, 1, std="population")


@given(batches(SIXTEENTHS), st.sampled_from(STDS))
def test_batch_advantages_equal_those_of_a_single_group_of_all_answers(batch, std):
    rewards, _ = tensors(*batch[:2])
    advantages = over_answers(rewards, std=std)
    assert advantages.dtype == torch.float32
    expected = by_hand(rewards.tolist(), [0] * len(rewards), std)
    assert advantages.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("std", STDS)
@pytest.mark.parametrize("reward", [0.0, 0.1, -3.7])
def test_batch_of_equal_rewards_gives_exactly_zero(reward, std):
    rewards = torch.full((7,), reward)
    assert over_answers(rewards, std=std).tolist() == [0.0] * 7


def test_group_without_right_answers_has_negative_batch_advantages():
    rewards, group = tensors([0, 0, 1, 1], [0, 0, 1, 1])
    assert group_advantages(rewards, group, 2, std="none").tolist() == [0, 0, 0, 0]
    assert over_answers(rewards, std="none").tolist() == [-0.5, -0.5, 0.5, 0.5]
