"""Setup of a run from its configuration: models are built and restored first, then the parts that use them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist

from megatron_rl.agent.api import Environment, TrainingSet
from megatron_rl.agent.registry import build_environment, with_kept_files
from megatron_rl.checkpoint.adapters import check_base
from megatron_rl.checkpoint.hf.export import Exporter
from megatron_rl.checkpoint.save import Checkpointer
from megatron_rl.config import RunConfig
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.errors import ConfigurationError
from megatron_rl.inference.capabilities import capabilities_of
from megatron_rl.metrics.writer import MetricsWriter, Writer
from megatron_rl.model.tokenizer import Tokenizer, build_tokenizer
from megatron_rl.platform.api import Platform
from megatron_rl.rank.groups import Groups
from megatron_rl.rank.here import Here
from megatron_rl.rank.profiler import StepProfiler
from megatron_rl.rank.safe_points import SafePoints
from megatron_rl.recipe.own_code import kept
from megatron_rl.refit.prober import Prober, probe_text
from megatron_rl.rollout.bank.bank import Bank
from megatron_rl.rollout.bank.records import Lineage, fingerprint
from megatron_rl.rollout.curriculum import CurriculumState
from megatron_rl.rollout.driver import RolloutDriver
from megatron_rl.rollout.record import RolloutRecord
from megatron_rl.rollout.window import Drawn
from megatron_rl.run.generation import Generation, generate_here
from megatron_rl.run.lesson import record_lesson, right_answer
from megatron_rl.run.models import Models, build_models
from megatron_rl.run.objective import objective_of
from megatron_rl.run.problems import STALE_MOUNT_S, check_alike, check_unchanged, choose_problems, digests_of
from megatron_rl.run.state import Counters, Driver, Run
from megatron_rl.run.teacher import build_teacher
from megatron_rl.standalone.first_rows import Fault, Lesson, faults, unknown_end_of
from megatron_rl.supervised.driver import ExampleDriver
from megatron_rl.supervised.rows import rows_of
from megatron_rl.training.trainer import Trainer

if TYPE_CHECKING:
    from megatron_rl.inference.replicas.pool import ReplicaPool

logger = logging.getLogger("megatron_rl")

DATA = "data"
"""Name of the rows of `data` among the digests of problems."""


def set_up(
    run_dir: RunDir, attempt: Attempt, config: RunConfig, platform: Platform, groups: Groups, safe_points: SafePoints
) -> Run:
    """Set up a run at its newest checkpoint, or at its start. Collective.

    Raises ConfigurationError for an inconsistent recipe, CheckpointError if the run has checkpoints but none is usable,
    RuntimeError if this rank's problems differ from those of most ranks, and LeaveAgreed if a rank is asked to leave.
    """
    try:
        tokenizer = build_tokenizer(config.tokenizer)
        environment = None
        if config.generates:
            environment = build_environment(with_kept_files(config.task, run_dir, STALE_MOUNT_S), tokenizer)
        config = with_kept_functions(config, run_dir)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    training_sets, left_out = _training_sets(environment, config, tokenizer)
    checkpointer = Checkpointer(run_dir, config.save, groups.control)
    lesson = Lesson(config, tokenizer, environment, training_sets)
    if warning := unknown_end_of(lesson):
        logger.warning("%s", warning)
    check_lesson(lesson, checkpointer.resumes, groups)
    pool = None
    if config.placement.mode == "partitioned":
        from megatron_rl.run import partitioned  # slow to import: it needs an HTTP client

        pool = partitioned.open_pool(run_dir, attempt, config, groups)
    problems = digests_of(training_sets, DATA if config.supervised else config.task.name)
    check_alike(problems, groups.control)
    models, initial_weights = build_models(
        config, environment, tokenizer, platform, groups, safe_points, resumes=checkpointer.resumes
    )
    counters = restore(checkpointer, models, initial_weights, safe_points)
    check_unchanged(run_dir, counters.step, counters.problems, problems)
    models.optimizer.offload()
    teacher = build_teacher(run_dir, attempt, config, tokenizer, platform, groups, safe_points)

    objective = objective_of(config, models.policy, models.reference, teacher)
    here = Here(run_dir, attempt, platform, groups, safe_points)
    progress = counters.policy_version, counters.nonfinite_in_a_row
    trainer = Trainer(models.policy, models.optimizer, objective, config, here, *progress)
    generation = _generation(config, models, tokenizer, groups, safe_points, run_dir, attempt, pool, training_sets)
    if generation is not None:
        generation.refit.publish(counters.policy_version)
    drawn = Drawn(counters.drawn_below, counters.passed_over)
    curriculum = None
    if config.curriculum is not None and counters.curriculum is not None and counters.problems == problems:
        curriculum = CurriculumState.from_json(counters.curriculum)
    driver: Driver
    loop = generation.loop if generation is not None else None
    if environment is None or generation is None or config.supervised:
        driver = ExampleDriver(training_sets, tokenizer, config, groups, environment, loop)
    else:
        bank = None
        if (role := generation.loop.role).drives:
            recipe = fingerprint(config, problems)
            lineage = Lineage(run_dir.root.name, attempt.number, counters.step, counters.policy_version, recipe)
            bank = Bank(
                run_dir.bank,
                config.resume,
                lineage,
                next_ordinal=counters.next_ordinal,
                driver=role.index,
                drivers=role.count,
            )
        driver = RolloutDriver(
            environment,
            training_sets,
            generation.engine,
            bank,
            config,
            groups,
            safe_points,
            generation.loop,
            counters.step,
            drawn,
            curriculum,
            counters.next_ordinal,
        )
    scored = None if config.supervised else environment
    record_lesson(run_dir, training_sets, scored, loop, tokenizer, config, safe_points)
    writer = Writer()
    if dist.get_rank() == 0:
        values = config.model_dump(mode="json")
        writer = MetricsWriter(run_dir, attempt, config.logging, counters.step, counters.evaluated, values)
    return Run(
        config=config,
        platform=platform,
        groups=groups,
        safe_points=safe_points,
        environment=environment,
        left_out=left_out,
        problems=problems,
        models=models,
        initial_weights=counters.initial_weights,
        trainer=trainer,
        generation=generation,
        driver=driver,
        checkpointer=checkpointer,
        exporter=Exporter(run_dir, config.save, leads=dist.get_rank() == 0),
        writer=writer,
        record=RolloutRecord(
            attempt,
            dist.get_rank(),
            config.logging,
            tokenizer,
            prompts_per_step=config.grpo.prompts_per_step,
            last_step=config.training.steps,
            right=partial(right_answer, scored),
            every_group=not config.supervised,
        ),
        profiler=StepProfiler(attempt, dist.get_rank(), config.profile, platform),
        step=counters.step,
        next_ordinal=counters.next_ordinal,
        drawn=drawn,
        curriculum=curriculum,
        saved=counters.step,
        evaluated=counters.evaluated,
    )


def _training_sets(
    environment: Environment | None, config: RunConfig, tokenizer: Tokenizer
) -> tuple[list[TrainingSet], dict[str, int]]:
    """Return the rows of data, or the problems of the environment as `choose_problems` does. Raises
    ConfigurationError."""
    if config.supervised or environment is None:
        return [TrainingSet("", 1.0, rows_of(config.rows, environment))], {}
    if not all(each.problems for each in environment.training_sets()):
        raise ConfigurationError(f"environment {config.task.name!r} has no training problems")
    return choose_problems(environment, config, tokenizer)


def check_lesson(lesson: Lesson, resumes: bool, groups: Groups) -> None:
    """Check the first rows, and the user's reward on an answer, before any model is built. Rank 0 does it for all.

    Raises ConfigurationError on all ranks.
    """
    found: list[list[Fault]] = [[*faults(lesson, resumes)] if dist.get_rank() == 0 else []]
    dist.broadcast_object_list(found, src=0, group=groups.control)
    for fault in found[0]:
        if not fault.certain:
            logger.warning("%s", fault.text)
    if certain := [fault.text for fault in found[0] if fault.certain]:
        raise ConfigurationError("; ".join(certain))


def _generation(
    config: RunConfig,
    models: Models,
    tokenizer: Tokenizer,
    groups: Groups,
    safe_points: SafePoints,
    run_dir: RunDir,
    attempt: Attempt,
    pool: ReplicaPool | None,
    training_sets: Sequence[TrainingSet],
) -> Generation | None:
    """Set up the generation of answers; None if nothing is sampled. Collective."""
    policy, platform = models.policy, models.platform
    if not config.generates:
        return None
    prober = None
    able = capabilities_of(config.inference.engine)
    if able.probed:
        prompts = (problem.prompt for problem in training_sets[0].problems)
        prober = Prober(policy, probe_text(prompts, tokenizer, config.sequence_length), groups)
    if pool is None:
        return generate_here(policy, config, tokenizer, platform, groups, safe_points, attempt)
    from megatron_rl.run import partitioned

    return partitioned.generate_elsewhere(policy, pool, config, platform, groups, safe_points, prober)


def with_kept_functions(config: RunConfig, run_dir: RunDir) -> RunConfig:
    """Replace the files of the user's functions by the run's copies. Raises ValueError if their record cannot be
    read."""
    copies = {key: kept(function, run_dir, STALE_MOUNT_S) for key, function in config.grpo.own_functions.items()}
    return config.model_copy(update={"grpo": config.grpo.model_copy(update=copies)})


def restore(
    checkpointer: Checkpointer, models: Models, initial_weights: str | None, safe_points: SafePoints
) -> Counters:
    """Restore the models from the newest good checkpoint, if any, and return the run's counters. Collective.

    initial_weights: digest of the present `model.checkpoint` or `model.huggingface`, if read.

    Raises ConfigurationError if the run started from other weights: the KL penalty would pull to the wrong ones, and
    adapters would be added to them.
    """
    safe_points.activity.enter("loading the checkpoint", 0)
    with safe_points.timeline.phase("load"):
        checkpoint = checkpointer.restore(models.restore)
    if checkpoint is None:
        return Counters(initial_weights=initial_weights)
    counters = Counters.of(checkpoint.manifest.meta)
    if initial_weights is not None and counters.adapters is not None:
        check_base(checkpoint.folder, checkpoint.manifest.meta, initial_weights)
    elif initial_weights is not None and initial_weights != counters.initial_weights:
        raise ConfigurationError(
            "model.checkpoint (or huggingface) has changed since this run started, and the KL penalty (grpo.kl_beta) "
            "needs the original weights: restore them, or start another run"
        )
    logger.info("resuming after step %d", counters.step)
    return counters
