"""Choice of the advantage estimator by the recipe.

    group, leave_one_out    relative to the answers to the same prompt
    batch                   relative to all answers of the step
    maxrl                   relative to the group, divided by its mean
    per_reward              each component of the reward relative to the group
    pass_at_k               best of k answers: see `best_of_k.py`
    module:function         the user's own: see `own_baseline.py`

All estimators are functions of `ScoredAnswers`, which has whole groups. Those for which `reads_batch` is true need the
groups of the whole step, of all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.advantages import (
    batch_advantages,
    group_advantages,
    leave_one_out_advantages,
    maxrl_advantages,
    over_batch_std,
    per_reward_advantages,
)
from megatron_rl.algorithms.answers import ScoredAnswers
from megatron_rl.algorithms.best_of_k import best_of_k_advantages
from megatron_rl.algorithms.config import AdvantageStd, GrpoConfig
from megatron_rl.algorithms.own_baseline import as_advantages, own_baseline
from megatron_rl.recipe.own_code import is_own


def reads_batch(config: GrpoConfig) -> bool:
    """Whether the advantage of an answer depends on other groups."""
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
        return as_advantages(own(answers.in_fp32(), config), answers)
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
