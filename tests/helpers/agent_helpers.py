"""Rollouts of an environment, with an engine of the test."""

from __future__ import annotations

import asyncio
from typing import Any

from megatron_rl.agent.api import Environment, GroupRolloutRequest
from megatron_rl.agent.scoring import RolloutLimits
from megatron_rl.agent.trajectories import Problem, TrajectoryGroup
from megatron_rl.recipe.inference import Sampling

LIMITS = RolloutLimits(60.0)


def rolled_out(
    agent: Environment, engine: Any, size: int = 1, *, problem: Problem | None = None, limits: RolloutLimits = LIMITS
) -> TrajectoryGroup:
    """Return a group of answers to a problem, by default the first one to train on."""
    asked = problem or agent.training_problems()[0]
    request = GroupRolloutRequest(5, asked, size, Sampling(max_new_tokens=600), 11, engine, limits)
    return asyncio.run(agent.group_rollout(request))
