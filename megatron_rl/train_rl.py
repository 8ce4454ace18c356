"""The training loop: each step generates and scores, or reads rows of data, trains, refits and records; some steps also
evaluate and save.

Every rank runs it, and all ranks enter the same phases in the same order. Between phases are safe points, where the
ranks agree whether to leave. Any phase may raise `LeaveAgreed`, which leaves the run as it was after the last step.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress

from megatron_rl.checkpoint.save import SaveFailed
from megatron_rl.checkpoint.save_schedule import SaveSchedule
from megatron_rl.contract.codes import DRAINED, FINISHED
from megatron_rl.learn.supervised.early_stop import best_after
from megatron_rl.learn.supervised.held_out import ALL
from megatron_rl.rank.entry import gc_between_steps
from megatron_rl.rank.metrics.metric import StepReport
from megatron_rl.rank.metrics.report import step_lines
from megatron_rl.rank.safe_points import POLL_S, LeaveAgreed
from megatron_rl.run.state import Run

logger = logging.getLogger("megatron_rl")


def train(run: Run) -> str:
    """Train to the last step, until `training.early_stop` ends the run, or until asked to leave. Returns FINISHED or
    DRAINED. A run beyond its last step, because `training.steps` was lowered, has finished."""
    last = run.config.training.steps
    if run.step > last:
        logger.warning(
            "the checkpoint is of step %d and training.steps is %d: nothing is left to train", run.step, last
        )
        return FINISHED
    schedule = SaveSchedule(run.checkpointer, run.step, last)
    with gc_between_steps() as collect_garbage, suppress(LeaveAgreed):
        while True:
            due = run.evaluates and run.config.evaluation.any_due(run.step, last)
            due = due and run.evaluated < run.step
            conclude_evaluation(run, wait=due or run.step == last)
            if due:
                evaluate(run)
            best = run.best is not None and run.best.step == run.step
            if run.saved < run.step and schedule.due(run.step, wanted=best or bool(run.why_over)):
                save(run)
            if run.step == last or run.why_over:
                return FINISHED
            train_step(run)
            run.checkpointer.load_ahead()
            collect_garbage(run.step)
    return DRAINED


def train_step(run: Run) -> None:
    """Run one step. If LeaveAgreed interrupts its updates, `run.trainer.between_steps` is false."""
    step = run.step + 1
    run.safe_points.activity.enter("training", step)

    batch = run.driver.collect(run.next_ordinal)
    with run.profiler.training(step):
        run.refit.begin_training()
        stats = run.trainer.train(batch, step, weights_change=run.refit.finish, record=run.record)
        with run.safe_points.phase("refit"):
            run.refit.publish(run.trainer.policy_version)
    run.step, run.next_ordinal, run.drawn, run.curriculum = step, batch.next_ordinal, batch.drawn, batch.curriculum

    report = StepReport(
        step=step,
        stats=stats,
        generation_rounds=batch.rounds,
        first_ordinal=batch.first_ordinal,
        next_ordinal=batch.next_ordinal,
        policy_version=run.trainer.policy_version,
        dropped=batch.dropped,
        failures=batch.failures,
        components=batch.components,
        tracebacks=run.environment.tracebacks() if run.environment else {},
        refit_bytes=run.refit.moved_bytes,
        left_out=run.material.left_out,
        ahead=run.config.asynchronous.max_lag > 0,
        rows=sum(len(each.problems) for each in run.material.lesson.sets) if run.config.supervised else None,
        passes=run.material.mix.passes(batch.next_ordinal) if run.material.mix else {},
    )
    metrics, line = step_lines(report, run.safe_points.timeline, run.groups.control)
    metrics |= batch.curriculum_metrics
    run.writer.step(step, metrics | save_metrics(run) | (run.generation.metrics() if run.generation else {}))
    run.writer.timeline(line)


def evaluate(run: Run) -> None:
    """Evaluate, or begin to beside training, but never the first and the last step. What goes on beside training begins
    with a checkpoint, whose weights a resumed run needs to repeat it."""
    if run.beside is not None and 0 < run.step < run.config.training.steps:
        if run.saved < run.step:
            save(run)
        with run.safe_points.phase("evaluate"):
            begun = run.beside.begin(run.step)
        if begun:
            run.evaluated = run.step
            return
    run.safe_points.activity.enter("evaluating", run.step)
    with run.safe_points.phase("evaluate"):
        metrics, early = run.evaluate(), run.config.training.early_stop
        run.writer.evaluation(run.step, metrics)
    run.evaluated = run.step
    if early is not None and (loss := metrics.get(f"eval/{ALL}/loss")) is not None:
        run.best = best_after(run.best, loss, run.step, early)


def conclude_evaluation(run: Run, *, wait: bool) -> None:
    """Record the evaluation that goes on beside training, if all its answers are there, or once they are."""
    if (beside := run.beside) is None or (step := beside.step) is None:
        return
    if wait:
        run.safe_points.activity.enter("evaluating", step)
        with run.safe_points.phase("evaluate"):
            beside.wait()
    elif not beside.finished():
        return
    run.writer.evaluation(step, run.with_format(beside.end()))


def save(run: Run) -> None:
    """Start a checkpoint of the current step, after the last one is written. It is written in the background."""
    with run.safe_points.phase("save"):
        while run.checkpointer.saving is not None and not run.safe_points.poll():
            run.checkpointer.wait(until=time.monotonic() + POLL_S)
        run.safe_points.agree()
        begin_save(run)


def begin_save(run: Run) -> None:
    """Start a checkpoint of the current step. Blocks until its tensors are copied to host memory."""
    run.writer.sync()
    run.record.sync()
    needed = run.driver.begin_checkpoint(run.step, run.next_ordinal, run.trainer.policy_version)
    run.checkpointer.save(run.step, run.models.sharded_state(), run.counters(), needed)
    run.saved = run.step


def save_metrics(run: Run) -> dict[str, float]:
    """Return metrics of checkpoints that have ended. Failures are logged and counted, but do not end the
    run: the last checkpoint is untouched."""
    metrics: dict[str, float] = {}
    for outcome in run.checkpointer.poll():
        if isinstance(outcome, SaveFailed):
            logger.warning("%s", outcome)
            metrics["system/failed_saves"] = metrics.get("system/failed_saves", 0) + 1
        else:
            logger.info("checkpoint of step %d published, %d bytes", outcome.step, outcome.bytes)
            run.driver.end_checkpoint(outcome.step)
            metrics |= {"time/save_blocked_s": outcome.blocked_s, "time/save_s": outcome.total_s}
    return metrics
