"""Credit assignment: the advantage of every trajectory, and which trajectories and groups have a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.agent.trajectories import TrajectoryGroup
from megatron_rl.algorithms.advantages import RewardMoments, batch_advantages, group_advantages
from megatron_rl.algorithms.loss import has_gradient
from megatron_rl.algorithms.overlong import trained_mask
from megatron_rl.algorithms.signal import group_rewards, has_signal
from megatron_rl.config import RunConfig


@dataclass(frozen=True, slots=True)
class Credit:
    """Credit of complete groups, whose trajectories are concatenated; on the CPU."""

    group: Tensor
    """[trajectories] index of the group."""
    rewards: Tensor
    """[trajectories] as scored."""
    advantages: Tensor
    """[trajectories]"""
    signal: Tensor
    """[groups] whether the rewards differ: see `has_signal`."""
    carries_loss: Tensor
    """[trajectories] 1, or 0 if masked as overlong."""
    has_gradient: list[bool]
    """[trajectories] whether it goes through the model: see `loss.has_gradient`."""


def assign_credit(groups: Sequence[TrajectoryGroup], config: RunConfig, batch: RewardMoments | None = None) -> Credit:
    """Return the credit of groups. With `grpo.baseline: group` it does not depend on other groups.

    batch: moments of the whole batch, for its baseline; None: these groups are the batch.
    """
    rewards = group_rewards(groups, config.sampling.max_new_tokens, config.grpo.overlong)
    cut = [each.finish_reason == "length" for group in groups for each in group.trajectories]
    divide = config.grpo.advantage_std
    if config.grpo.baseline == "batch":
        advantages = batch_advantages(rewards.shaped, batch or RewardMoments.of(rewards.shaped), divide_by_std=divide)
    else:
        advantages = group_advantages(rewards.shaped, rewards.group, len(groups), divide_by_std=divide)
    carries_loss = trained_mask(torch.tensor(cut, dtype=torch.bool), config.grpo.overlong)
    return Credit(
        group=rewards.group,
        rewards=rewards.scored,
        advantages=advantages,
        signal=has_signal(rewards.shaped, rewards.group, len(groups)),
        carries_loss=carries_loss,
        has_gradient=has_gradient(advantages, carries_loss, config.grpo).tolist(),
    )
