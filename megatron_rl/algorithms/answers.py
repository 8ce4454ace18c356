"""Scored answers: the table that advantages are computed from, one row an answer; and the groups that dynamic sampling
keeps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.agent.reward_value import TURN_REWARDS
from megatron_rl.agent.trajectories import Trajectory, TrajectoryGroup
from megatron_rl.algorithms.rewards import has_signal, length_rewards, overlong_penalty
from megatron_rl.model.platform.host_tensors import floats, int64
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.environment_section import EnvironmentConfig


@dataclass(frozen=True, slots=True)
class ScoredAnswers:
    """Answers of whole groups, group after group, on the CPU. Lost answers have no row."""

    group: Tensor
    """[answers] int64, index of each answer's group."""
    num_groups: int
    """Number of groups, those without answers included."""
    scored: Tensor
    """[answers] fp64, reward as the environment gave it."""
    rewards: Tensor
    """[answers] fp64, reward after `environment.reward_weights`, `grpo.overlong` and `grpo.length_penalty`; advantages
    are computed from it."""
    accuracy: Tensor
    """[answers] fp64, see `accuracy_of`."""
    tokens: Tensor
    """[answers] int64, tokens in the loss masks of all sequences of the answer."""
    components: Mapping[str, Tensor]
    """Name -> [answers] fp64, components of the rewards as scored; NaN where the answer has none of that name."""
    component_weights: Mapping[str, Tensor]
    """Name -> [answers] fp64, `environment.reward_weights` of the answer's environment; 0 where it does not name the
    component."""

    @property
    def penalties(self) -> Tensor:
        """[answers] fp64, what `grpo.overlong` and `grpo.length_penalty` add to the rewards."""
        weighted = torch.zeros_like(self.rewards, dtype=torch.bool)
        before = torch.zeros_like(self.rewards)
        for name, weights in self.component_weights.items():
            weighted = weighted | (weights != 0)
            before = before + torch.where(weights != 0, weights * self.components[name], 0.0)
        return self.rewards - torch.where(weighted, before, self.scored)

    def of_groups(self, kept: Tensor) -> ScoredAnswers:
        """Return the table of some groups. kept: [groups] bool."""
        rows, place = kept[self.group], kept.cumsum(0) - 1
        found = self.each(lambda column: column[rows])
        return replace(found, group=place[found.group], num_groups=int(kept.sum()))

    def each(self, change: Callable[[Tensor], Any]) -> ScoredAnswers:
        """Return the table with every column changed."""

        def changed(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {name: change(column) for name, column in value.items()}
            return change(value) if isinstance(value, Tensor) else value

        return replace(self, **{field.name: changed(getattr(self, field.name)) for field in fields(self)})


def scored_answers(groups: Sequence[TrajectoryGroup], config: RunConfig) -> ScoredAnswers:
    counts = [len(group.trajectories) for group in groups]
    index = torch.repeat_interleave(int64(counts))
    answers = [trajectory for group in groups for trajectory in group.trajectories]
    of_groups = [config.environment_of(group.problem.environment) for group in groups]
    environments = [its for its, count in zip(of_groups, counts, strict=True) for _ in range(count)]
    weights = [environment.reward_weights or {} for environment in environments]
    scored = fp64([answer.reward for answer in answers])
    accuracy = fp64([accuracy_of(answer, its) for answer, its in zip(answers, environments, strict=True)])
    rewards = scored
    if any(weights):
        rewards = fp64([weighted_reward(answer, its) for answer, its in zip(answers, weights, strict=True)])
    algorithm = algorithms_of(groups, config)[index]
    for number, grpo in enumerate(config.algorithms.each):
        shaped = rewards
        if grpo.length_penalty:
            lengths = int64([answer.answer_length for answer in answers])
            shaped = shaped + grpo.length_penalty * length_rewards(lengths, accuracy >= 1, index, len(groups))
        if (overlong := grpo.overlong).mode == "penalty":
            last = [max(len(sequence.turns[-1]) for sequence in answer.sequences) for answer in answers]
            shaped = shaped + overlong_penalty(
                int64(last),
                max_new_tokens=config.sampling.max_new_tokens,
                buffer=overlong.buffer,
                penalty=overlong.penalty,
            )
        if shaped is not rewards:
            rewards = torch.where(algorithm == number, shaped, rewards)
    return ScoredAnswers(
        group=index,
        num_groups=len(groups),
        scored=scored,
        rewards=rewards,
        accuracy=accuracy,
        tokens=int64([sum([s.loss_mask.count(True) for s in a.sequences]) for a in answers]),
        components={
            name: fp64([answer.components.get(name, math.nan) for answer in answers])
            for name in sorted({name for answer in answers for name in answer.components})
        },
        component_weights={
            name: fp64([its.get(name, 0.0) for its in weights])
            for name in sorted({name for its in weights for name in its})
        },
    )


def algorithms_of(groups: Sequence[TrajectoryGroup], config: RunConfig) -> Tensor:
    """Return the algorithm of each group's environment, [groups] int64 index in `RunConfig.algorithms`."""
    algorithms = config.algorithms
    return int64([algorithms.index(group.problem.environment) for group in groups])


def accuracy_of(answer: Trajectory, environment: EnvironmentConfig) -> float:
    """Return how right an answer is: the component that the environment's `accuracy` names, or else the reward that is
    trained on, without penalties on its length. 1: right."""
    if environment.accuracy is not None:
        return answer.components[environment.accuracy]
    found = weighted_reward(answer, environment.reward_weights or {})
    # Weights of 0.01, 0.29 and 0.7 have a sum that is rounded to less than 1.
    return 1.0 if environment.reward_weights and math.isclose(found, 1.0, rel_tol=1e-12) else found


def weighted_reward(answer: Trajectory, weights: Mapping[str, float]) -> float:
    """Return the sum of the components times their weights; without weights the reward as scored."""
    if not weights:
        return answer.reward
    return math.fsum(weight * answer.components[name] for name, weight in weights.items())


def fp64(values: Sequence[float]) -> Tensor:
    """Return numbers of answers as a tensor. In fp32, rewards of 1e6 and 1e6 + 1 would have a mean and a deviation that
    are rounding alone."""
    return floats(values, np.float64)


def usable(group: TrajectoryGroup, config: RunConfig) -> bool:
    """Whether dynamic sampling keeps the group: its answers differ in accuracy, and the mean is within the limits. Any
    group without dynamic sampling.

    DAPO (arXiv 2503.14476) filters by accuracy, before rewards are shaped. Under a penalty on long answers, a group
    whose answers are all wrong would have a signal that teaches nothing but length.
    """
    dynamic = config.algorithms.by(group.problem.environment).dynamic_sampling
    if not dynamic.enabled:
        return True
    found = accuracies(group, config)
    values = torch.tensor(found, dtype=torch.float64)
    if not has_signal(values, torch.zeros(len(found), dtype=torch.long), 1).item():
        return False
    mean = math.fsum(found) / len(found)
    low, high = dynamic.min_accuracy, dynamic.max_accuracy
    return (low is None or mean >= low) and (high is None or mean <= high)


def accuracies(group: TrajectoryGroup, config: RunConfig) -> list[float]:
    """Return how right each answer of the group is: see `environment.accuracy`."""
    environment = config.environment_of(group.problem.environment)
    return [accuracy_of(answer, environment) for answer in group.trajectories]


def with_turn_rewards(group: TrajectoryGroup) -> TrajectoryGroup:
    """Return the group without the answers that lack rewards by turn; they are counted as lost."""
    lacking = [not answer.turn_scores for answer in group.trajectories]
    if not any(lacking):
        return group
    reason = f"the reward has no {TURN_REWARDS} (grpo.turn_discount)"
    return _without(group, lacking, Counter({reason: sum(lacking)}))


def with_components(group: TrajectoryGroup, names: Set[str]) -> TrajectoryGroup:
    """Return the group without the answers that lack one of these components of the reward; they are counted as
    lost."""
    if all(names <= answer.components.keys() for answer in group.trajectories):
        return group
    reasons = [reason_to_lose(answer, names) for answer in group.trajectories]
    return _without(group, [*map(bool, reasons)], Counter(filter(None, reasons)))


def reason_to_lose(answer: Trajectory, names: Set[str]) -> str | None:
    """Return why an answer is lost whose reward must have these components; None if it has them."""
    lacking = sorted(names - answer.components.keys())
    return f"the reward has no component {lacking[0]} (environment.reward_weights, accuracy)" if lacking else None


def _without(group: TrajectoryGroup, missing: Sequence[bool], failures: Counter[str]) -> TrajectoryGroup:
    """Return the group without some answers, which are lost for these reasons. missing: [answers]"""
    kept = [answer for answer, is_missing in zip(group.trajectories, missing, strict=True) if not is_missing]
    lost = {sample for sample, is_missing in zip(group.samples, missing, strict=True) if is_missing}
    all_failures, all_lost = failures + Counter(group.failures), tuple(sorted({*group.lost} | lost))
    return replace(group, trajectories=kept, failures=all_failures, lost=all_lost)
