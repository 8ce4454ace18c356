"""Set-up of a run from its configuration: the material it trains on, models, generation, and what uses them."""

from __future__ import annotations

from functools import partial

import torch.distributed as dist

from megatron_rl.checkpoint.save import Checkpointer
from megatron_rl.learn.rollout.record import RolloutRecord
from megatron_rl.learn.supervised.held_out import HeldOutRows
from megatron_rl.learn.training.objective import objective_of
from megatron_rl.learn.training.trainer import Trainer
from megatron_rl.model.grammar import Grammars
from megatron_rl.rank.here import Here
from megatron_rl.rank.metrics.writer import MetricsWriter, Writer
from megatron_rl.rank.profiler import StepProfiler
from megatron_rl.recipe.config import RunConfig
from megatron_rl.run.generation import build_driver, build_generation, curriculum_of, open_replicas
from megatron_rl.run.lesson import record_lesson, right_answer
from megatron_rl.run.models import build_judges, build_models
from megatron_rl.run.problems import build_material, check_unchanged
from megatron_rl.run.repeated_evaluation import ResumedEvaluation, resume_evaluation
from megatron_rl.run.reward_connection import connect_reward_model
from megatron_rl.run.state import Counters, Run, best_so_far, restore


def set_up(config: RunConfig, here: Here) -> Run:
    """Set up a run at its newest checkpoint, or at its start. Collective.

    Raises ConfigurationError for an inconsistent recipe, CheckpointError if the run has checkpoints but none is usable,
    RuntimeError if this rank's problems differ from those of most ranks, and LeaveAgreed if a rank is asked to leave.
    """
    checkpointer = Checkpointer(here.run_dir, config.save, here.groups.control)
    material = build_material(config, here, resumes=checkpointer.resumes)
    lesson = material.lesson
    config, tokenizer, environment = lesson.config, lesson.tokenizer, lesson.environment
    replicas = open_replicas(config, here)

    models, initial = build_models(config, here, tokenizer, environment, resumes=checkpointer.resumes)
    counters = restore(checkpointer, models, initial, here.safe_points)
    check_unchanged(here.run_dir, counters.step, counters.problems, material.digests)
    models.optimizer.offload()
    judges = build_judges(config, models.policy, here, tokenizer)
    objective = objective_of(config, models.policy, models.reference, judges)
    progress = counters.policy_version, counters.nonfinite_in_a_row
    trainer = Trainer(models.policy, models.optimizer, objective, config, here, *progress)
    trainer.grammars = Grammars(tokenizer)

    connect_reward_model(config, here, environment)
    generation = build_generation(config, here, lesson, models, replicas)
    evaluation = ResumedEvaluation()
    if generation is not None:
        evaluation = resume_evaluation(config, here, lesson, models, generation, counters)
        generation.refit.publish(counters.policy_version)
    driver = build_driver(config, here, material, generation, counters)
    record_lesson(here, lesson, material.scoring, generation.loop if generation else None)

    rank, held_out = dist.get_rank(), lesson.rows.held_out if lesson.rows else {}
    right = partial(right_answer, material.scoring)
    run = Run(
        config=config,
        here=here,
        material=material,
        models=models,
        initial_weights=counters.initial_weights,
        trainer=trainer,
        generation=generation,
        driver=driver,
        held_out=HeldOutRows(held_out, tokenizer, config) if held_out else None,
        checkpointer=checkpointer,
        writer=_writer(config, here, counters, checkpointer),
        record=RolloutRecord(here.attempt, rank, config, tokenizer, right),
        profiler=StepProfiler(here.attempt, rank, config.profile, here.platform),
        step=counters.step,
        next_ordinal=counters.next_ordinal,
        drawn=counters.drawn,
        curriculum=curriculum_of(config, material, counters),
        saved=counters.step,
        evaluated=counters.evaluated,
        beside=evaluation.beside,
        best=best_so_far(counters, material.digests, here.run_dir, here.groups.control),
    )
    if evaluation.metrics and evaluation.step is not None:
        run.writer.evaluation(evaluation.step, run.with_format(evaluation.metrics))
    return run


def _writer(config: RunConfig, here: Here, counters: Counters, checkpointer: Checkpointer) -> Writer:
    if dist.get_rank() != 0:
        return Writer()
    checkpointer.pass_over_newer()
    recorded = counters.evaluating is None
    return MetricsWriter(
        here.run_dir, here.attempt, config.logging, counters.step, counters.evaluated, recorded=recorded
    )
