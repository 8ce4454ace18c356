"""Who answers the prompts of a run. Whoever asks cannot tell whether the ranks that train do, as here, or replicas of
other ranks, as in partitioned.py, or a server, as in external.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from megatron_rl.config import RunConfig
from megatron_rl.inference.api import ResumableInference
from megatron_rl.model.policy import Policy
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.platform.api import Platform
from megatron_rl.rank.engine_ranks import EngineRanks
from megatron_rl.rank.groups import Groups
from megatron_rl.rank.safe_points import SafePoints
from megatron_rl.refit.engine import build_engine
from megatron_rl.refit.publish import Refit
from megatron_rl.rollout.generation import AgentLoop, DriverPlace, EngineLoop
from megatron_rl.rollout.lasting import EngineInTurn, LastingLoop


@dataclass(frozen=True, slots=True)
class Generation:
    """This rank's share of generation."""

    engine: ResumableInference
    """That this rank's driver asks, or that follows it."""
    refit: Refit
    """From the trained weights to the engine's."""
    place: DriverPlace
    loop: AgentLoop
    lasting: Callable[[], LastingLoop]
    """Makes a loop for agents whose work outlives a step."""
    end: Callable[[], None] = lambda: None
    """Called when nothing is asked any more."""
    metrics: Callable[[], dict[str, float]] = dict
    """Of the newest step, on the first rank."""


def generate_here(
    policy: Policy,
    config: RunConfig,
    tokenizer: Tokenizer,
    platform: Platform,
    groups: Groups,
    safe_points: SafePoints,
) -> Generation:
    """An engine on the ranks that train, which answers by the weights of `policy` once they are published.
    Collective."""
    timeout = timedelta(seconds=config.job.collective_timeout_s)
    ranks = EngineRanks.form(groups, config.placement.inference.tp or config.placement.training.tp, timeout)
    engine, refit = build_engine(
        policy, config, tokenizer.vocab_size, tokenizer.end_ids, platform, groups, ranks, tokenizer.decode
    )
    runner = asyncio.Runner()
    loop = EngineLoop(ranks, engine, safe_points, runner)
    return Generation(engine, refit, ranks, loop, partial(EngineInTurn, ranks, engine, safe_points, runner))
