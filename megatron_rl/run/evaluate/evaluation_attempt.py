"""One attempt of an evaluation's job: a rank that evaluates, as `megatron_rl.run.attempt` is one that trains."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any, TypeVar

import megatron_rl.model.platform.megatron_core  # noqa: F401  before the modules below import megatron-core themselves
from megatron_rl.contract.attempt_records import Outcome
from megatron_rl.contract.codes import DRAINED, FINISHED
from megatron_rl.contract.files import WRITE_PATIENCE_S
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.records import write
from megatron_rl.rank.activity import Activity
from megatron_rl.rank.drain import DrainListener
from megatron_rl.rank.metrics.timeline import Timeline
from megatron_rl.rank.rendezvous import meet
from megatron_rl.rank.safe_points import SafePoints
from megatron_rl.rank.standalone_world import StandaloneWorld
from megatron_rl.rank.world import World
from megatron_rl.recipe.config import read_config
from megatron_rl.recipe.evaluation_job import read_evaluation
from megatron_rl.run.evaluate.blocks import AnsweringEngine, EvaluationProgress
from megatron_rl.run.evaluate.evaluator import evaluate

T = TypeVar("T")


def run_evaluation(
    run_dir: RunDir, attempt: Attempt, world: World, activity: Activity, drain: DrainListener, timeline: Timeline
) -> str:
    """Evaluate until all is answered, or a rank is asked to leave. Returns FINISHED or DRAINED, after rank 0 has
    written it; the step of the outcome is the number of answered problems."""
    evaluation = read_evaluation(run_dir)
    assert evaluation is not None
    evaluation = evaluation.model_copy(update={"out": evaluation.out or str(run_dir.evaluation)})
    timeout = timedelta(seconds=read_config(run_dir).job.collective_timeout_s)
    store = meet(attempt.address("train"), world.rank, world.size, timeout)
    evaluation_world = StandaloneWorld(world.rank, world.size, world.local_rank, store)
    safe_points = SafePoints(activity, drain, timeline)
    drain.started()
    activity.enter("loading the weights", 0)
    answered = 0

    def report(progress: EvaluationProgress) -> None:
        nonlocal answered
        answered = progress.done
        activity.enter("evaluating", answered)

    def conclude(done: bool) -> None:
        if not done:
            drain.notify_host(world.rank)
        outcome = Outcome(FINISHED if done else DRAINED, answered)
        write(attempt.outcome, outcome, patience=WRITE_PATIENCE_S)

    with asyncio.Runner() as loop:

        def run(work: Coroutine[Any, Any, T], engine: AnsweringEngine) -> T | None:
            return loop.run(safe_points.run_until_asked(work, sign_of_life=lambda: engine.busy_s))

        done = evaluate(evaluation, run, report, evaluation_world, activity.waits, conclude)
    if world.rank:  # rank 0 has written the outcome
        return DRAINED if drain.asked else FINISHED
    return FINISHED if done else DRAINED
