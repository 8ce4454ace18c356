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
from megatron_rl.algorithms.answers import ScoredAnswers, algorithms_of, scored_answers
from megatron_rl.algorithms.own_functions import as_advantages, own_baseline
from megatron_rl.algorithms.rewards import has_signal, trained_mask
from megatron_rl.algorithms.turn_credit import answers_of_agents, scored_turns, spread, turn_advantages
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.grpo import AdvantageStd, GrpoConfig
from megatron_rl.recipe.own_code import is_own


@dataclass(frozen=True, slots=True)
class Credit:
    """Credit of complete groups, whose trajectories are concatenated; on the CPU."""

    group: Tensor  # [trajectories] index of the group
    rewards: Tensor  # [trajectories] as scored
    accuracy: Tensor  # [trajectories] see `accuracy_of`
    advantages: Tensor  # [trajectories]; with credit by turn the mean over the trained tokens
    signal: Tensor  # [groups] whether the rewards differ: see `has_signal`
    carries_loss: Tensor  # [trajectories] 1, or 0 if masked as overlong
    has_gradient: list[bool]
    """[trajectories] whether some token has a gradient or a loss, so that it goes through the model."""
    of_spans: Tensor | None = None
    """[spans of all trajectories] advantages of `turn_credit.spans`; None if all tokens of an answer have one."""


def assign_credit(groups: Sequence[TrajectoryGroup], config: RunConfig, known: Tensor | None = None) -> Credit:
    """Return the credit of sampled answers.

    known: [trajectories] their advantages, if those depend on other groups of the step (`reads_batch`); None computes
        them from these groups.
    """
    answers = scored_answers(groups, config)
    algorithm, algorithms = algorithms_of(groups, config), config.algorithms.each
    of_answers = algorithm[answers.group]
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    cut = torch.tensor([each.finish_reason == "length" for each in trajectories], dtype=torch.bool)
    masked = torch.stack([trained_mask(cut, each.overlong) for each in algorithms])
    carries_loss = masked.gather(0, of_answers[None])[0]
    signal = has_signal(answers.rewards, answers.group, len(groups))
    advantages = estimates(answers, algorithm, algorithms) if known is None else known
    taught, of_spans = advantages != 0, None
    of_environments = config.teachings
    teachings = [of_environments.by(group.problem.environment) for group in groups]
    of_rewards = torch.tensor([1.0 if one is None else one.reward_weight for one in teachings])[answers.group]
    if (of_turns := credit_of_turns(groups, answers, algorithm, algorithms, advantages)) is not None:
        of_answer, tokens, of_spans = spread(trajectories, of_turns, advantages)
        taught = torch.zeros_like(advantages).index_add(0, of_answer, (of_spans != 0).float()) > 0
        signal = signal | (torch.zeros(len(groups)).index_add(0, answers.group, taught.float()) > 0)
        advantages = _means(of_spans, tokens, of_answer, advantages)
        of_spans = of_spans * of_rewards[of_answer]
    # Without a penalty, bonus or teacher, every term of a token's loss is a multiple of its advantage.
    all_learn = torch.tensor([each.trains_all_answers for each in algorithms])[of_answers]
    judged = torch.tensor([one is not None for one in teachings], dtype=torch.bool)[answers.group]
    learns = taught & (of_rewards != 0) | all_learn | judged
    return Credit(
        group=answers.group,
        rewards=answers.scored,
        accuracy=answers.accuracy,
        advantages=advantages * of_rewards,
        signal=signal,
        carries_loss=carries_loss,
        has_gradient=((carries_loss != 0) & learns).tolist(),
        of_spans=of_spans,
    )


def credit_of_turns(
    groups: Sequence[TrajectoryGroup],
    answers: ScoredAnswers,
    algorithm: Tensor,
    algorithms: Sequence[GrpoConfig],
    advantages: Tensor,
) -> Tensor | None:
    """Return the advantages of the turns of all answers that have rewards by turn, [turns] fp32; None if no algorithm
    reads these and no turn names an agent.

    Args:
        algorithm: [groups] see `algorithms_of`.
        advantages: [answers] their own.

    Raises ConfigurationError for agents under an estimator that compares over the step.
    """
    discounts = [algorithms[number].turn_discount for number in algorithm.tolist()]
    scores = [(score, at) for at, each in enumerate(groups) for one in each.trajectories for score in one.turn_scores]
    if not any(score.agent or discounts[at] is not None for score, at in scores):
        return None
    turns = scored_turns(groups, [1.0 if discount is None else discount for discount in discounts])
    of_speakers = torch.zeros(len(turns.speaker_rewards))
    if turns.named.any():
        table = answers_of_agents(turns, answers)
        of_groups = torch.zeros(table.num_groups, dtype=torch.long)
        of_groups[table.group] = algorithm[answers.group[turns.speaker_answer]]
        for number in of_groups.unique().tolist():
            if reads_batch(grpo := algorithms[number]):
                raise ConfigurationError(
                    "turn_rewards name agents, whose rewards are compared within a group, and grpo.baseline "
                    f"{grpo.baseline} with advantage_std_of {grpo.advantage_std_of} compares over the step: set "
                    "baseline to group and leave advantage_std_of out"
                )
        of_speakers = estimates(table, of_groups, algorithms)
    found = torch.zeros(len(turns.answer))
    of_turns = algorithm[answers.group[turns.answer]]
    for number, grpo in enumerate(algorithms):
        found = torch.where(of_turns == number, turn_advantages(turns, advantages, of_speakers, grpo), found)
    return found


def _means(of_spans: Tensor, tokens: Tensor, of_answer: Tensor, advantages: Tensor) -> Tensor:
    """Return the mean advantage over the tokens of each answer, [answers]; for one without tokens its own."""
    sums = torch.zeros(len(advantages), dtype=torch.float64).index_add(0, of_answer, of_spans.double() * tokens)
    counts = torch.zeros_like(sums).index_add(0, of_answer, tokens.double())
    return torch.where(counts > 0, sums / counts.clamp(min=1), advantages.double()).float()


def credit_of_rows(groups: Sequence[TrajectoryGroup]) -> Credit:
    """Return the credit of rows of data, whose tokens are all learned alike."""
    index = [number for number, group in enumerate(groups) for _ in group.trajectories]
    ones = torch.ones(len(index))
    return Credit(
        group=torch.tensor(index, dtype=torch.long),
        rewards=torch.zeros(len(index)),
        accuracy=torch.zeros(len(index)),
        advantages=ones,
        signal=torch.ones(len(groups), dtype=torch.bool),
        carries_loss=ones,
        has_gradient=[True] * len(index),
    )


def reads_batch(config: GrpoConfig) -> bool:
    """Whether the advantages depend on the answers to other prompts."""
    names = config.baseline in ("batch", "per_reward") or is_own(config.baseline)
    return names or config.advantage_std_of != "baseline"


def estimates(answers: ScoredAnswers, algorithm: Tensor, algorithms: Sequence[GrpoConfig]) -> Tensor:
    """Return the advantages of answers of several environments, [answers] fp32; each algorithm sees its own.

    algorithm: [groups] index of each group's.
    """
    if len(algorithms) == 1:
        return estimate(answers, algorithms[0])
    found = torch.zeros(len(answers.rewards))
    for number, grpo in enumerate(algorithms):
        its = algorithm == number
        found[its[answers.group]] = estimate(answers.of_groups(its), grpo)
    return found


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
