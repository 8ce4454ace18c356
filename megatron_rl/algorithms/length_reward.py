"""Reward for short answers, relative to the other answers to the same prompt."""

from __future__ import annotations

import torch
from torch import Tensor


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
