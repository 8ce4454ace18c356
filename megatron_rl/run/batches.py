"""The driver of a run, which makes the batches of its steps: from sampled answers, or from rows of data."""

from __future__ import annotations

from megatron_rl.config import RunConfig
from megatron_rl.rank.here import Here
from megatron_rl.rollout.bank.bank import Bank
from megatron_rl.rollout.bank.records import Lineage, fingerprint
from megatron_rl.rollout.curriculum import CurriculumState, prompts_of
from megatron_rl.rollout.driver import RolloutDriver
from megatron_rl.rollout.in_flight import InFlightGroups
from megatron_rl.rollout.window import Window
from megatron_rl.run.problems import Material
from megatron_rl.run.state import Counters, Driver, Generation
from megatron_rl.supervised.example_driver import ExampleDriver


def build_driver(
    config: RunConfig, here: Here, material: Material, generation: Generation | None, counters: Counters
) -> Driver:
    """Build the driver of a run that continues after the step of these counters."""
    lesson = material.lesson
    if generation is None or (agent := material.scoring) is None:
        loop = generation.loop if generation else None
        return ExampleDriver(lesson.sets, lesson.tokenizer, config, here.groups, lesson.environment, loop)
    state = curriculum_of(config, material, counters)
    prompts = prompts_of(config, lesson.sets, state, counters.next_ordinal, counters.drawn)
    in_flight = None
    if (bank := _bank(config, here, material, generation, counters)) is not None:
        in_flight = InFlightGroups(agent, prompts.problem, generation.engine, bank, config)
    window = Window.of(config, counters.step, counters.drawn)
    return RolloutDriver(prompts, window, generation.loop, in_flight, config, here)


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
