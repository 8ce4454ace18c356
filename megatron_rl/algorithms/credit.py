"""Credit assignment: the advantage of every trajectory, and which trajectories and groups have a gradient.

The recipe chooses the estimator of the advantages:

    group, leave_one_out    relative to the answers to the same prompt
    batch                   relative to all answers of the step
    maxrl                   relative to the group, divided by its mean
    per_reward              each component of the reward relative to the group
    pass_at_k               best of k answers
    module:function         the user's: see `own_functions.py`

All are functions of `ScoredAnswers`, which has whole groups. Those for which `reads_batch` is true need the groups of
the whole step, of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.agent.trajectories import TrajectoryGroup
from megatron_rl.algorithms.advantages import (
    batch_advantages,
    best_of_k_advantages,
    group_advantages,
    leave_one_out_advantages,
    maxrl_advantages,
    over_batch_std,
    per_reward_advantages,
)
from megatron_rl.algorithms.answers import ScoredAnswers, scored_answers
from megatron_rl.algorithms.own_functions import as_advantages, own_baseline
from megatron_rl.algorithms.rewards import has_signal, trained_mask
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.grpo import AdvantageStd, GrpoConfig
from megatron_rl.recipe.own_code import is_own


@dataclass(frozen=True, slots=True)
class Credit:
    """Credit of complete groups, whose trajectories are concatenated; on the CPU."""

    group: Tensor  # [trajectories] index of the group
    rewards: Tensor  # [trajectories] as scored
    advantages: Tensor  # [trajectories]
    signal: Tensor  # [groups] whether the rewards differ: see `has_signal`
    carries_loss: Tensor  # [trajectories] 1, or 0 if masked as overlong
    has_gradient: list[bool]
    """[trajectories] whether some token has a gradient or a loss, so that it goes through the model."""


def assign_credit(groups: Sequence[TrajectoryGroup], config: RunConfig, known: Tensor | None = None) -> Credit:
    """Return the credit of sampled answers.

    known: [trajectories] their advantages, if those depend on other groups of the step (`reads_batch`); None computes
        them from these groups.
    """
    answers = scored_answers(groups, config)
    cut = [each.finish_reason == "length" for group in groups for each in group.trajectories]
    advantages = (estimate(answers, config.grpo) if known is None else known) * config.reward_weight
    carries_loss = trained_mask(torch.tensor(cut, dtype=torch.bool), config.grpo.overlong)
    # Without a penalty, bonus or teacher, every term of a token's loss is a multiple of its advantage.
    learns = (advantages != 0) | config.trains_all_answers
    return Credit(
        group=answers.group,
        rewards=answers.scored,
        advantages=advantages,
        signal=has_signal(answers.rewards, answers.group, len(groups)),
        carries_loss=carries_loss,
        has_gradient=((carries_loss != 0) & learns).tolist(),
    )


def credit_of_rows(groups: Sequence[TrajectoryGroup]) -> Credit:
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


def reads_batch(config: GrpoConfig) -> bool:
    names = config.baseline in ("batch", "per_reward") or is_own(config.baseline)
    return names or config.advantage_std_of != "baseline"


def estimate(answers: ScoredAnswers, config: GrpoConfig) -> Tensor:
    """Return the advantages that `grpo.baseline` and `grpo.advantage_std` define, [answers] fp32.

    answers: those of the whole step, if `reads_batch`.

    Raises:
        ValueError: a reward is negative (`baseline: maxrl`), or a function of the user's returns something else.
    """
    if (own := own_baseline(config)) is not None:
        # Users write torch.zeros(n).index_add(0, answers.group, answers.rewards), which takes fp32 alone.
        in_fp32 = answers.each(lambda column: column.float() if column.is_floating_point() else column)
        return as_advantages(own(in_fp32, config), answers)
    rewards, group, groups, std = answers.rewards, answers.group, answers.num_groups, config.advantage_std
    of_baseline: AdvantageStd = std if config.advantage_std_of == "baseline" else "none"
    units = answers.tokens if config.batch_over == "tokens" else torch.ones_like(answers.tokens)
    match config.baseline:
        case "group":
            found = group_advantages(rewards, group, groups, std=of_baseline)
        case "leave_one_out":
            found = leave_one_out_advantages(rewards, group, groups, std=of_baseline)
        case "batch":
            found = batch_advantages(rewards, units, std=of_baseline)
        case "maxrl":
            found = maxrl_advantages(rewards, group, groups)
        case "pass_at_k":
            assert config.pass_k is not None, "checked in GrpoConfig"
            found = best_of_k_advantages(rewards, group, groups, k=config.pass_k, std=of_baseline != "none")
        case _:
            found = per_reward_advantages(answers, units, std=std)
    match config.advantage_std_of:
        case "batch":
            found = over_batch_std(found, rewards, units, std=std)
        case "advantages":
            found = batch_advantages(found, units, std=std)
    return found
