"""Helpers for tests of the bank: lineages, entries without a file, banks, and an interrupted driver."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from megatron_rl.agent.api import GroupedRolloutGenerator
from megatron_rl.agent.trajectories import TrajectoryGroup
from megatron_rl.learn.rollout import agent_loop
from megatron_rl.learn.rollout.agent_loop import AgentLoop, EngineInTurn
from megatron_rl.learn.rollout.bank.bank import Bank
from megatron_rl.learn.rollout.bank.bank_records import Lineage
from megatron_rl.learn.rollout.bank.file import Entry
from megatron_rl.learn.rollout.curriculum import prompts_of
from megatron_rl.learn.rollout.driver import RolloutDriver
from megatron_rl.learn.rollout.in_flight import InFlightGroups
from megatron_rl.learn.rollout.stream import Mixture
from megatron_rl.learn.rollout.window import NOTHING_DRAWN, Drawn, Window
from megatron_rl.rank.engine_ranks import EngineRanks
from megatron_rl.rank.here import Here
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.rollout import ResumeConfig
from megatron_rl.run.state import Run

NOWHERE = Path("nowhere.bank")


def lineage(attempt: int, policy_version: int = 0, recipe: str = "r") -> Lineage:
    """Lineage of an attempt that resumed from the checkpoint with this policy version."""
    return Lineage("run", attempt, policy_version, policy_version, recipe)


def entry(head: dict[str, Any], size: int = 100) -> Entry:
    return Entry(NOWHERE, 0, 0, size, 0, head)


def bank_in(
    folder: Path, attempt: int = 1, resume: ResumeConfig | None = None, policy_version: int = 0, **where: int
) -> Bank:
    """Open the bank of an attempt that resumed from a checkpoint with this policy version, by default for its only
    driver."""
    defaults = {"next_ordinal": 0, "driver": 0, "drivers": 1}
    return Bank(folder, resume or ResumeConfig(), lineage(attempt, policy_version), **defaults | where)


def rollout_driver(
    agent: GroupedRolloutGenerator,
    inference: Any,
    bank: Bank,
    config: RunConfig,
    here: Here,
    loop: AgentLoop,
    drawn: Drawn = NOTHING_DRAWN,
    **progress: Any,
) -> RolloutDriver:
    """Driver of the agent's problems. progress: last step, and `state` and `next_ordinal` of `prompts_of`."""
    window = Window.of(config, progress.pop("step", 0), drawn)
    prompts = prompts_of(config, agent.training_sets(), drawn=drawn, **progress)
    return RolloutDriver(
        prompts, window, loop, InFlightGroups(agent, prompts.problem, inference, bank, config), config, here
    )


def drive(run: Run, bank: Bank, agent: GroupedRolloutGenerator | None = None) -> None:
    """Give a run a driver with this bank, and with this agent instead of its environment."""
    agent = agent or run.environment
    run.generation.loop.close()  # of the driver that this one replaces
    run.generation = replace(run.generation, loop=loop_of(run))
    run.driver = rollout_driver(agent, run.engine, bank, run.config, run.here, run.generation.loop)


def loop_of(run: Run) -> EngineInTurn:
    return EngineInTurn(EngineRanks.form(run.groups, 1, timedelta(seconds=60)), run.engine, run.safe_points)


def collect(
    run: Run,
    bank: Bank | None = None,
    share: range | None = None,
    stop_after: int | None = None,
    agent: GroupedRolloutGenerator | None = None,
) -> list[TrajectoryGroup]:
    """Roll out a share, by default the run's first step, and return its groups; none if asked to leave after
    `stop_after` steps of the engine."""
    step, steps = run.engine.step, 0
    share = share or range(run.config.grpo.prompts_per_step)
    agent = agent or run.environment
    stream = Mixture(agent.training_sets(), run.config.training.seed, run.config.grpo.prompts_per_step)
    loop = loop_of(run)

    def counted() -> None:
        nonlocal steps
        step()
        steps += 1
        run.safe_points.drain.asked |= steps == stop_after

    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.engine, "step", counted)
        patch.setattr(agent_loop, "POLL_S", 0.0)
        bank = bank or bank_in(Path(folder))
        groups = InFlightGroups(agent, stream.problem, run.engine, bank, run.config)
        try:
            loop.do(lambda it: groups.begin(it, share, 0))
            loop.advance(lambda: loop.wait(groups.unfinished(share), lambda: (0, "")))
            loop.do(lambda _: groups.states(share, None))  # raises an agent's exception
            return [] if run.safe_points.drain.asked else loop.do(lambda _: groups.finished())
        finally:
            run.safe_points.drain.asked = False
            loop.advance(groups.stop)
            loop.pause()
            bank.close()
            loop.close()
