"""Groups that dynamic sampling keeps, and answers that lack a component of the reward."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Set
from dataclasses import replace

import torch

from megatron_rl.agent.trajectories import TrajectoryGroup
from megatron_rl.algorithms.answers import accuracy_of
from megatron_rl.algorithms.signal import has_signal
from megatron_rl.config import RunConfig


def usable(group: TrajectoryGroup, config: RunConfig) -> bool:
    """Whether dynamic sampling keeps the group: its answers differ in accuracy, and the mean is within the limits. Any
    group without dynamic sampling.

    DAPO (arXiv 2503.14476) filters by accuracy, before rewards are shaped. Under a penalty on long answers, a group
    whose answers are all wrong would have a signal that teaches nothing but length.
    """
    dynamic = config.grpo.dynamic_sampling
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
    component = config.environment_of(group.problem.environment).accuracy
    return [accuracy_of(answer, component) for answer in group.trajectories]


def with_components(group: TrajectoryGroup, names: Set[str]) -> TrajectoryGroup:
    """Return the group without the answers that lack one of these components of the reward; they are counted as
    lost."""
    lacking = [sorted(names - answer.components.keys()) for answer in group.trajectories]
    if not any(lacking):
        return group
    failures = Counter(group.failures)
    for missing in filter(None, lacking):
        failures[f"the reward has no component {missing[0]} (environment.reward_weights, accuracy)"] += 1
    kept = [answer for answer, missing in zip(group.trajectories, lacking, strict=True) if not missing]
    return replace(group, trajectories=kept, failures=failures)
