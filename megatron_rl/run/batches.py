"""The driver of a run, which makes the batches of its steps: from sampled answers, or from rows of data."""

from __future__ import annotations

from megatron_rl.config import RunConfig
from megatron_rl.rank.here import Here
from megatron_rl.rollout.bank.bank import Bank
from megatron_rl.rollout.bank.records import Lineage, fingerprint
from megatron_rl.rollout.curriculum import CurriculumState
from megatron_rl.rollout.driver import RolloutDriver
from megatron_rl.run.problems import Material
from megatron_rl.run.state import Counters, Driver, Generation
from megatron_rl.supervised.driver import ExampleDriver


def build_driver(
    config: RunConfig, here: Here, material: Material, generation: Generation | None, counters: Counters
) -> Driver:
    """Build the driver of a run that continues after the step of these counters."""
    lesson = material.lesson
    if generation is None or (agent := material.scoring) is None:
        loop = generation.loop if generation else None
        return ExampleDriver(lesson.sets, lesson.tokenizer, config, here.groups, lesson.environment, loop)
    return RolloutDriver(
        agent,
        lesson.sets,
        generation.engine,
        _bank(config, here, material, generation, counters),
        config,
        here.groups,
        here.safe_points,
        generation.loop,
        counters.step,
        counters.drawn,
        curriculum_of(config, material, counters),
        counters.next_ordinal,
    )


def _bank(config: RunConfig, here: Here, material: Material, generation: Generation, counters: Counters) -> Bank | None:
    """Open the bank; None on a rank that follows."""
    role = generation.loop.role
    if not role.drives:
        return None
    recipe = fingerprint(config, material.digests)
    lineage = Lineage(here.run_dir.root.name, here.attempt.number, counters.step, counters.policy_version, recipe)
    return Bank(
        here.run_dir.bank,
        config.resume,
        lineage,
        next_ordinal=counters.next_ordinal,
        driver=role.index,
        drivers=role.count,
    )


def curriculum_of(config: RunConfig, material: Material, counters: Counters) -> CurriculumState | None:
    """Return the curriculum's state after the step of these counters; None if there is none, or it begins."""
    if config.curriculum is None or counters.curriculum is None or counters.problems != material.digests:
        return None
    return CurriculumState.from_json(counters.curriculum)
