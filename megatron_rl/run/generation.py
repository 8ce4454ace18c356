"""Generation of a run, by an engine on the training ranks or by replicas (replica_generation.py), and the driver that
makes the batches of its steps, from sampled answers or from rows of data. The driver does not know who generates."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from megatron_rl.generate.refit.rank_engine import build_engine
from megatron_rl.learn.rollout.agent_loop import EngineInTurn
from megatron_rl.learn.rollout.bank.bank import Bank
from megatron_rl.learn.rollout.bank.bank_records import Lineage, fingerprint
from megatron_rl.learn.rollout.curriculum import CurriculumState, prompts_of
from megatron_rl.learn.rollout.driver import RolloutDriver
from megatron_rl.learn.rollout.in_flight import InFlightGroups
from megatron_rl.learn.rollout.window import Window
from megatron_rl.learn.supervised.example_driver import ExampleDriver
from megatron_rl.rank.engine_ranks import EngineRanks
from megatron_rl.rank.here import Here
from megatron_rl.rank.profiler import generation_profiler
from megatron_rl.recipe.config import RunConfig
from megatron_rl.run.models import Models
from megatron_rl.run.problems import Material
from megatron_rl.run.standalone.first_rows import Lesson
from megatron_rl.run.state import Counters, Driver, Generation

if TYPE_CHECKING:
    from megatron_rl.run.replica_generation import OpenReplicas


def open_replicas(config: RunConfig, here: Here) -> OpenReplicas | None:
    """Open the pool of replicas, before any model is built because replicas wait for it; None if there are none. The
    engines of those on the ranks' own devices start here. Collective.

    Raises ConfigurationError if the run has no token, NoReplicaLeft if no engine starts, and LeaveAgreed if a rank is
    asked to leave meanwhile.
    """
    if not config.has_replicas:
        return None
    from megatron_rl.run import replica_generation  # slow to import: it needs an HTTP client

    return replica_generation.open_replicas(config, here)


def build_generation(
    config: RunConfig, here: Here, lesson: Lesson, models: Models, replicas: OpenReplicas | None
) -> Generation | None:
    """Set up the generation of answers with the weights of the policy, once they are published; None if nothing is
    sampled. Collective."""
    if not config.generates:
        return None
    if replicas is not None:
        from megatron_rl.run import replica_generation

        return replica_generation.generate_elsewhere(config, here, lesson, models, replicas)
    tp = config.placement.inference.tp or config.placement.training.tp
    ranks = EngineRanks.form(here.groups, tp, timedelta(seconds=config.job.collective_timeout_s))
    tokenizer = lesson.tokenizer
    engine, refit = build_engine(
        models.policy,
        config,
        tokenizer.vocab_size,
        tokenizer.end_ids,
        here.platform,
        here.groups,
        ranks,
        tokenizer,
    )
    engine.profiler = generation_profiler(here.attempt, config, here.platform, dist.get_rank())
    return Generation(engine, refit, EngineInTurn(ranks, engine, here.safe_points))


def build_driver(
    config: RunConfig, here: Here, material: Material, generation: Generation | None, counters: Counters
) -> Driver:
    """Build the driver of a run that continues after the step of these counters."""
    lesson = material.lesson
    if generation is None or (agent := material.scoring) is None:
        loop = generation.loop if generation else None
        assert material.mix is not None  # rows are trained on, or answers are scored
        return ExampleDriver(material.mix, lesson.tokenizer, config, here.groups, lesson.environment, loop)
    state = curriculum_of(config, material, counters)
    prompts = prompts_of(config, lesson.sets, state, counters.next_ordinal, counters.drawn)
    in_flight, role = None, generation.loop.role
    if role.drives:
        recipe = fingerprint(config, material.digests)
        origin = here.run_dir.root.name, here.attempt.number, counters.step, counters.policy_version
        bank = Bank(
            here.run_dir.bank,
            config.resume,
            Lineage(*origin, recipe),
            next_ordinal=counters.next_ordinal,
            driver=role.index,
            drivers=role.count,
        )
        in_flight = InFlightGroups(agent, prompts.problem, generation.engine, bank, config)
    window = Window.of(config, counters.step, counters.drawn)
    return RolloutDriver(prompts, window, generation.loop, in_flight, config, here)


def curriculum_of(config: RunConfig, material: Material, counters: Counters) -> CurriculumState | None:
    """Return the curriculum's state after the step of these counters; None if there is none, or it begins."""
    if config.curriculum is None or counters.curriculum is None or counters.problems != material.digests:
        return None
    return CurriculumState.from_json(counters.curriculum)
