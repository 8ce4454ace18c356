"""The evaluation that a run had begun beside training and not recorded when it was saved: a resumed run repeats it,
with the weights of the evaluated step, which are in the checkpoint of that step."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

from megatron_rl.checkpoint.load import VerifiedCheckpoint, verify
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.manifest import Damaged
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import Unreadable, UnreadableRecord, read_lines
from megatron_rl.learn.rollout.evaluation import evaluate, sets_after
from megatron_rl.learn.rollout.evaluation_beside import EvaluationBeside
from megatron_rl.rank.control import Control
from megatron_rl.rank.here import Here
from megatron_rl.recipe.config import RunConfig
from megatron_rl.run.models import Models
from megatron_rl.run.standalone.first_rows import Lesson
from megatron_rl.run.state import Counters, Generation

logger = logging.getLogger("megatron_rl")

PATIENCE_S = 30.0  # seconds to retry a record that cannot be read at the start, for example on a stale mount


class ResumedEvaluation(NamedTuple):
    beside: EvaluationBeside | None = None
    """Evaluations beside training; None if training waits for them."""
    step: int | None = None
    """Step whose evaluation is repeated; None without one."""
    metrics: Mapping[str, float] = {}
    """Its metrics; empty while it goes on beside training."""


def resume_evaluation(
    config: RunConfig, here: Here, lesson: Lesson, models: Models, generation: Generation, counters: Counters
) -> ResumedEvaluation:
    """Repeat the evaluation that was not recorded, if there is one. Collective. Raises LeaveAgreed if a rank is asked
    to leave, and UnreadableRecord on rank 0."""
    step = unrecorded_step(here.run_dir, counters, here.groups.control)
    beside, metrics = (None, {}) if step is None else repeat(step, config, here, lesson, models, generation)
    return ResumedEvaluation(beside or beside_of(config, here, lesson, generation), step, metrics)


def unrecorded_step(run_dir: RunDir, counters: Counters, control: Control) -> int | None:
    """Return the step whose evaluation is to be repeated; None without one, or if it was recorded after the checkpoint
    that the run resumes from. Collective. Raises UnreadableRecord on rank 0."""
    step = None
    if control.rank == 0 and counters.evaluating is not None:
        lines = read_lines(MetricsLine, run_dir.evaluations, PATIENCE_S)
        if isinstance(lines, Unreadable):
            raise UnreadableRecord(str(lines))
        recorded = any(line.step == counters.evaluating for line in lines.records)
        step = None if recorded else counters.evaluating
    return control.share(step)


def repeat(
    step: int, config: RunConfig, here: Here, lesson: Lesson, models: Models, generation: Generation
) -> tuple[EvaluationBeside | None, dict[str, float]]:
    """Answer again with the weights of a step, in front of which the run's own weights are put aside. Collective.

    Returns the evaluation if it goes on beside training, otherwise None and its metrics: of all answers as lost if the
    checkpoint is damaged. Raises LeaveAgreed if a rank is asked to leave.
    """
    environment = lesson.environment
    assert environment is not None
    checkpoint = _checkpoint_of(step, here)
    if checkpoint is None:
        sets = sets_after(environment, config, step)
        return None, {f"eval/{one.name}/failed_rollouts": one.answers for one in sets}
    control, loop = here.groups.control, generation.loop
    with models.weights_of(checkpoint):
        generation.refit.publish(checkpoint.manifest.meta["policy_version"])
        beside = beside_of(config, here, lesson, generation)
        if beside is not None and beside.begin(step):
            return beside, {}
        return None, evaluate(environment, generation.engine, config, control, loop, step)


def beside_of(config: RunConfig, here: Here, lesson: Lesson, generation: Generation) -> EvaluationBeside | None:
    """Return what evaluates beside training; None if training waits for evaluations."""
    if generation.keeper is None or lesson.environment is None:
        return None
    return EvaluationBeside(lesson.environment, config, here.groups.control, generation.loop, generation.keeper)


def _checkpoint_of(step: int, here: Here) -> VerifiedCheckpoint | None:
    try:
        return verify(here.run_dir.checkpoint(step), here.groups.control)
    except Damaged as error:
        logger.warning("the evaluation of step %d is lost, its checkpoint cannot be read: %s", step, error)
        return None
