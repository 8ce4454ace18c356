"""Advantages: the reward of each answer relative to the other answers to its prompt, or to all answers of the batch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from megatron_rl.algorithms.signal import SIGNAL_SPREAD, has_signal

STD_EPSILON = 1e-4
"""Added to the standard deviation by which advantages are divided."""


class RewardMoments(NamedTuple):
    """Moments and extremes of the rewards of some answers, for a baseline."""

    answers: float = 0.0
    total: float = 0.0
    squares: float = 0.0
    """Sum of squares."""
    lowest: float = math.inf
    highest: float = -math.inf

    @classmethod
    def of(cls, rewards: Tensor) -> RewardMoments:
        if not len(rewards):
            return cls()
        exact = rewards.detach().double()
        moments = (exact.sum(), exact.square().sum(), exact.min(), exact.max())
        return cls(float(len(rewards)), *(float(each) for each in moments))

    @classmethod
    def joined(cls, parts: Iterable[RewardMoments]) -> RewardMoments:
        answers, total, squares, lowest, highest = zip(*parts, strict=True)
        return cls(math.fsum(answers), math.fsum(total), math.fsum(squares), min(lowest), max(highest))

    @property
    def differ(self) -> bool:
        return self.highest - self.lowest > SIGNAL_SPREAD * max(abs(self.highest), abs(self.lowest))


def group_advantages(rewards: Tensor, group: Tensor, num_groups: int, *, divide_by_std: bool) -> Tensor:
    """Return the advantage of each answer within its group, in fp32.

    (reward - mean) / (1e-4 + population std) of GRPO (arXiv 2402.03300), or reward - mean of Dr. GRPO (arXiv
    2503.20783). In a group without signal (see `has_signal`), such as a single answer, it is exactly 0.

    Args:
        rewards: [trajectories], any floating type.
        group: [trajectories] int64, the group of each trajectory in 0..num_groups-1; groups may differ in size.
        divide_by_std: False is Dr. GRPO.

    Returns:
        [trajectories] fp32, without gradient.

    Raises:
        RuntimeError: a group index is not below `num_groups`.
    """
    deviation = _deviation(rewards, group, num_groups) * has_signal(rewards, group, num_groups)[group]
    if not divide_by_std:
        return deviation
    std = _mean(deviation.square(), group, num_groups).sqrt()
    return deviation / (STD_EPSILON + std)[group]


def batch_advantages(rewards: Tensor, batch: RewardMoments, *, divide_by_std: bool) -> Tensor:
    """Return the advantage of each answer within the whole batch (REINFORCE++, arXiv 2501.03262 eq. 5), in fp32.

    (reward - mean) / (1e-4 + population std), or reward - mean; 0 if all rewards of the batch are equal.

    Args:
        rewards: [trajectories], any floating type.
        batch: moments of all answers of the batch, including these.

    Returns:
        [trajectories] fp32, without gradient.
    """
    rewards = rewards.detach().double()
    if not batch.differ:
        return rewards.float() * 0.0
    mean = batch.total / batch.answers
    deviation = rewards - mean
    if divide_by_std:
        deviation /= STD_EPSILON + math.sqrt(max(0.0, batch.squares / batch.answers - mean**2))
    return deviation.float()


def _deviation(rewards: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """Return each reward minus its group's mean, [trajectories] fp32."""
    rewards = rewards.detach().float()
    lowest = rewards.new_zeros(num_groups).scatter_reduce(0, group, rewards, "amin", include_self=False)
    # Relative to the lowest reward: n equal rewards need not sum to exactly n times one of them, but n zeros sum to 0.
    above_lowest = rewards - lowest[group]
    return above_lowest - _mean(above_lowest, group, num_groups)[group]


def _mean(values: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """Return the mean of each group's values, [groups]; 0 for an empty group."""
    zeros = values.new_zeros(num_groups)
    counts = zeros.index_add(0, group, values.new_ones(()).expand_as(values))
    return zeros.index_add(0, group, values) / counts.clamp(min=1)
