"""Rewards shaped by the length of answers, and which answers and groups then teach something."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.recipe.kept_answers import OverlongConfig


def overlong_penalty(length: Tensor, *, max_new_tokens: int, buffer: int, penalty: float) -> Tensor:
    """Return DAPO's soft overlong punishment (arXiv 2503.14476 eq. 13), which is added to the reward of each answer.

    0 up to `max_new_tokens - buffer` tokens, then falling linearly to `-penalty` at `max_new_tokens`.

    Args:
        length: [trajectories] integer, tokens of each answer.
        max_new_tokens: the limit, in tokens.
        buffer: tokens before the limit over which the penalty grows, above 0.
        penalty: reward subtracted at the limit, not negative.

    Returns:
        [trajectories] fp64, each in [-penalty, 0].
    """
    into_buffer = (length - (max_new_tokens - buffer)).double() / buffer
    return into_buffer.clamp(0, 1).mul(-penalty)


def trained_mask(cut: Tensor, overlong: OverlongConfig) -> Tensor:
    """Return which answers carry loss: all, or in `mode: mask` only those that were not cut off.

    A masked answer still counts in its group's mean, because it is a sample of the policy like the others.

    Args:
        cut: [trajectories] bool, whether the answer ended at the limit of new tokens (finish reason `length`).

    Returns:
        [trajectories] fp32, 1 for answers that are trained on, else 0.
    """
    return (~cut).float() if overlong.mode == "mask" else torch.ones_like(cut, dtype=torch.float32)


def length_rewards(lengths: Tensor, right: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """Return Kimi k1.5's length reward (arXiv 2501.12599, section 2.3.3) of each answer.

        s = 1/2 - (length - shortest) / (longest - shortest)    right answers: s    wrong answers: min(0, s)

    Shortest and longest are those of the group. A right answer is paid for being short, a wrong one only loses by being
    long. If all answers of a group have one length, they get 0.

    Args:
        lengths: [answers] int64, tokens.
        right: [answers] bool.
        group: [answers] int64, group of each answer in 0..num_groups-1.

    Returns:
        [answers] fp64, each between -1/2 and 1/2.
    """
    exact = lengths.double()
    zeros = exact.new_zeros(num_groups)
    shortest = zeros.scatter_reduce(0, group, exact, "amin", include_self=False)[group]
    longest = zeros.scatter_reduce(0, group, exact, "amax", include_self=False)[group]
    share = 0.5 - (exact - shortest) / (longest - shortest).clamp(min=1)
    return torch.where(longest == shortest, 0.0, torch.where(right, share, share.clamp(max=0.0)))


SIGNAL_SPREAD = 5e-7
"""Largest spread of equal rewards, relative to the largest of them: four units in the last place of fp32, in which a
reward model computes."""


def has_signal(rewards: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """Return which groups have rewards that differ by more than rounding, [groups] bool. The advantages of groups
    without signal in their shaped rewards are 0, if they are relative to the group.

    Args:
        rewards: [answers] scored or shaped rewards.
        group: [answers] int64, the group of each in 0..num_groups-1.
    """
    rewards = rewards.detach().double()
    zeros = rewards.new_zeros(num_groups)
    highest = zeros.scatter_reduce(0, group, rewards, "amax", include_self=False)
    lowest = zeros.scatter_reduce(0, group, rewards, "amin", include_self=False)
    return highest - lowest > SIGNAL_SPREAD * torch.maximum(highest.abs(), lowest.abs())
