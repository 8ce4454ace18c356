"""Groups with signal: those whose answers have different rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.agent.trajectories import TrajectoryGroup
from megatron_rl.algorithms.config import OverlongConfig
from megatron_rl.algorithms.overlong import shaped_rewards

SIGNAL_SPREAD = 1e-6
"""Largest spread of equal rewards, relative to the largest of them: fp32 has seven digits, and a mean or a penalty
rounds the last one."""


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """Rewards of all trajectories of some groups."""

    group: Tensor
    """[trajectories] int64, index of each one's group."""
    scored: Tensor
    """[trajectories] fp32, as scored by the environment."""
    shaped: Tensor
    """[trajectories] fp32, after the overlong penalty; advantages are computed from these."""


def group_rewards(groups: Sequence[TrajectoryGroup], max_new_tokens: int, overlong: OverlongConfig) -> GroupRewards:
    """Return the rewards of the groups' trajectories, group after group, on the CPU.

    max_new_tokens: limit of one turn. The penalty depends on the last turn, which may have been cut there; if a
        trajectory has several sequences, on the longest of their last turns.
    """
    index = [i for i, group in enumerate(groups) for _ in group.trajectories]
    rewards = [trajectory.reward for group in groups for trajectory in group.trajectories]
    scored = torch.tensor(rewards, dtype=torch.float32)
    shaped = scored
    if overlong.mode == "penalty":
        last = [
            max(len(sequence.turns[-1]) for sequence in trajectory.sequences)
            for group in groups
            for trajectory in group.trajectories
        ]
        lengths = torch.tensor(last, dtype=torch.long)
        shaped = shaped_rewards(scored, lengths, max_new_tokens=max_new_tokens, overlong=overlong)
    return GroupRewards(torch.tensor(index, dtype=torch.long), scored, shaped)


def has_signal(rewards: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """Return which groups have rewards that differ by more than rounding, [groups] bool. Dynamic sampling keeps the
    groups with signal in their scored rewards (arXiv 2503.14476); the advantages of groups without signal in their
    shaped rewards are 0.

    Args:
        rewards: [trajectories] scored or shaped rewards.
        group: [trajectories] int64, the group of each in 0..num_groups-1.
    """
    rewards = rewards.detach().float()
    zeros = rewards.new_zeros(num_groups)
    highest = zeros.scatter_reduce(0, group, rewards, "amax", include_self=False)
    lowest = zeros.scatter_reduce(0, group, rewards, "amin", include_self=False)
    return highest - lowest > SIGNAL_SPREAD * torch.maximum(highest.abs(), lowest.abs())
