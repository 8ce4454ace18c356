"""Groups with signal: those whose answers have different rewards."""

from __future__ import annotations

import torch
from torch import Tensor

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
