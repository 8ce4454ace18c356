"""Credit assignment: the advantage of every trajectory, and which trajectories and groups have a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.agent.trajectories import TrajectoryGroup
from megatron_rl.algorithms.answers import scored_answers
from megatron_rl.algorithms.estimators import estimate
from megatron_rl.algorithms.loss import has_gradient
from megatron_rl.algorithms.overlong import trained_mask
from megatron_rl.algorithms.signal import has_signal
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


def assign_credit(groups: Sequence[TrajectoryGroup], config: RunConfig, known: Tensor | None = None) -> Credit:
    """Return the credit of groups.

    known: [trajectories] their advantages, if those depend on other groups of the step (`estimators.reads_batch`); None
        computes them from these groups.
    """
    if config.supervised:
        return _all_alike(groups)
    answers = scored_answers(groups, config)
    cut = [each.finish_reason == "length" for group in groups for each in group.trajectories]
    advantages = estimate(answers, config.grpo) if known is None else known
    if config.distill is not None:
        advantages = advantages * config.distill.reward_weight
    carries_loss = trained_mask(torch.tensor(cut, dtype=torch.bool), config.grpo.overlong)
    return Credit(
        group=answers.group,
        rewards=answers.scored,
        advantages=advantages,
        signal=has_signal(answers.rewards, answers.group, len(groups)),
        carries_loss=carries_loss,
        has_gradient=(
            carries_loss != 0 if config.distill else has_gradient(advantages, carries_loss, config.grpo)
        ).tolist(),
    )


def _all_alike(groups: Sequence[TrajectoryGroup]) -> Credit:
    """Return the credit of rows of data, whose tokens are all learned alike."""
    index = [number for number, group in enumerate(groups) for _ in group.trajectories]
    ones = torch.ones(len(index))
    return Credit(
        group=torch.tensor(index, dtype=torch.long),
        rewards=torch.zeros(len(index)),
        advantages=ones,
        signal=torch.ones(len(groups), dtype=torch.bool),
        carries_loss=ones,
        has_gradient=[True] * len(index),
    )
