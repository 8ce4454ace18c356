"""The reward model that a run starts on replicas: wait for it, and have the environment ask it."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from megatron_rl.agent.api import Environment
from megatron_rl.contract.paths import REWARD
from megatron_rl.rank.here import Here
from megatron_rl.rank.safe_points import POLL_S
from megatron_rl.recipe.config import RunConfig


def connect_reward_model(config: RunConfig, here: Here, environment: Environment | None) -> None:
    """Wait until a replica of the reward model answers, if the run has one, and have the environment ask them all.
    Collective.

    Raises FixedModelLost if all are given up, RuntimeError if none answers within job.silence_limit_s, and LeaveAgreed
    if a rank is asked to leave.
    """
    if config.reward is None or environment is None:
        return
    from megatron_rl.generate.replicas.fixed_replicas import running_replicas  # its HTTP client is slow to import

    limit_s = config.job.silence_limit_s
    running = running_replicas(here.run_dir, here.attempt, REWARD, config.reward.replicas.answer_limit_s)
    here.safe_points.activity.enter("waiting for the reward model", 0)
    leads, give_up = dist.get_rank() == 0, time.monotonic() + limit_s
    while here.safe_points.maximum(torch.tensor([leads and not running()], dtype=torch.int32)).item():
        if time.monotonic() > give_up:
            raise RuntimeError(f"no replica of the reward model answered within {limit_s:g} s (job.silence_limit_s)")
        time.sleep(POLL_S)
    environment.use_reward_model(running, limit_s)
