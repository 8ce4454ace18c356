"""Generation of a run: by an engine on the training ranks, as set up here, or by replicas on other ranks
(partitioned.py). The driver does not distinguish between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megatron_rl.config import RunConfig
from megatron_rl.contract.paths import Attempt
from megatron_rl.inference.api import ResumableInference
from megatron_rl.model.policy import Policy
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.platform.api import Platform
from megatron_rl.rank.engine_ranks import EngineRanks
from megatron_rl.rank.groups import Groups
from megatron_rl.rank.profiler import generation_profiler
from megatron_rl.rank.safe_points import SafePoints
from megatron_rl.refit.engine import build_engine
from megatron_rl.refit.publish import Refit
from megatron_rl.rollout.agent_loop import AgentLoop, EngineInTurn


@dataclass(frozen=True, slots=True)
class Generation:
    """This rank's share of generation."""

    engine: ResumableInference
    """Engine this rank's driver queries, or its part of the engine on a rank that follows."""
    refit: Refit
    """Transfer of the trained weights to the engine."""
    loop: AgentLoop
    end: Callable[[], None] = lambda: None
    """Called after the last request."""
    metrics: Callable[[], dict[str, float]] = dict
    """Returns the metrics of the newest step, on the first rank."""


class NoRefit:
    """Implements `Refit` in a run that samples nothing."""

    moved_bytes = 0

    def publish(self, policy_version: int) -> None:
        """No-op: nobody needs the weights."""

    def finish(self) -> None:
        """No-op, as `publish` is."""


def generate_here(
    policy: Policy,
    config: RunConfig,
    tokenizer: Tokenizer,
    platform: Platform,
    groups: Groups,
    safe_points: SafePoints,
    attempt: Attempt,
) -> Generation:
    """Build an engine on the training ranks, which generates with the weights of `policy` once they are published.
    Collective."""
    timeout = timedelta(seconds=config.job.collective_timeout_s)
    ranks = EngineRanks.form(groups, config.placement.inference.tp or config.placement.training.tp, timeout)
    engine, refit = build_engine(
        policy, config, tokenizer.vocab_size, tokenizer.end_ids, platform, groups, ranks, tokenizer.decode
    )
    engine.profiler = generation_profiler(attempt, config, platform, dist.get_rank())
    return Generation(engine, refit, EngineInTurn(ranks, engine, safe_points))
