"""One attempt on one rank, from its configuration to its outcome: connect, set up, train, save.

Ranks leave only together, after the outcome is on disk: an exit code alone proves nothing.
"""

from __future__ import annotations

import logging
import time

import megatron_rl.model.platform.megatron_core  # noqa: F401  before the modules below import megatron-core themselves
from megatron_rl.checkpoint.save import Checkpointer
from megatron_rl.contract.attempt_records import Outcome, UsedKernels
from megatron_rl.contract.codes import DRAINED, FINISHED, MARGIN_S
from megatron_rl.contract.files import WRITE_PATIENCE_S, names_in
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.plan_records import PlanRecord
from megatron_rl.contract.records import if_readable, read, write
from megatron_rl.generate.engine.decode_graphs import why_not_recorded
from megatron_rl.model.core_config import DTYPES
from megatron_rl.model.experts import experts_one_by_one
from megatron_rl.model.platform.device import Device
from megatron_rl.model.platform.implementation import Implementation, choose_implementation
from megatron_rl.model.platform.select import select
from megatron_rl.rank.activity import Activity
from megatron_rl.rank.drain import DrainListener, fits, leave_early
from megatron_rl.rank.groups import connect, disconnect
from megatron_rl.rank.here import Here
from megatron_rl.rank.metrics.stats import Tally
from megatron_rl.rank.metrics.timeline import Timeline
from megatron_rl.rank.metrics.trackers.mirror import check_installed
from megatron_rl.rank.safe_points import POLL_S, LeaveAgreed, SafePoints
from megatron_rl.rank.world import World
from megatron_rl.recipe.config import RunConfig, read_config
from megatron_rl.recipe.inference import pages_of
from megatron_rl.run.setup import set_up
from megatron_rl.run.state import Run
from megatron_rl.train_rl import begin_save, save_metrics, train

logger = logging.getLogger("megatron_rl")


def run_attempt(
    run_dir: RunDir, attempt: Attempt, world: World, activity: Activity, drain: DrainListener, timeline: Timeline
) -> str:
    """Run one rank from start to exit. Returns FINISHED or DRAINED, after rank 0 has written the outcome."""
    config = read_config(run_dir)
    check_installed(config.logging)
    made_of = choose_implementation(config)
    platform = select(config.job, world.local_rank, made_of)
    if world.rank == 0:
        note_kernels(attempt, config, made_of, platform)
    groups = connect(world, config.job, config.placement.training, platform.backend, attempt.address("train"))
    safe_points = SafePoints(activity, drain, timeline)
    safe_points.connect(groups)
    drain.started()
    try:
        run = set_up(config, Here(run_dir, attempt, platform, groups, safe_points))
    except LeaveAgreed:
        leave_early(attempt, world.rank, drain)
        return DRAINED
    except RuntimeError:
        # A request to leave may arrive before all ranks have connected. A rank that has not connected leaves alone, and
        # the others lose the connection to it.
        if not (drain.asked or attempt.outcome.name in names_in(attempt.folder)):
            raise
        leave_early(attempt, world.rank, drain)
        return DRAINED
    outcome = carry_out(run)
    disconnect(platform)
    return outcome


def carry_out(run: Run) -> str:
    """Train, save and end generation: all that an attempt does once it is set up. Collective. Returns FINISHED or
    DRAINED, on every rank after rank 0 has written the outcome."""
    here = run.here
    attempt, safe_points, control = here.attempt, here.safe_points, here.groups.control
    write_timeline(run, resumed=run.step)

    safe_points.timeline.switch("train")
    outcome = train(run)
    if run.beside is not None:
        run.beside.stop()
    run.driver.stop()
    if run.generation is not None:
        run.generation.end()
    safe_points.activity.enter("saving", run.step)
    if outcome == FINISHED:
        with safe_points.phase("save"):
            finish_save(safe_points, run.checkpointer)
    else:
        with safe_points.phase("drain"):
            leave(run, here.run_dir)
    save_metrics(run)
    run.driver.close()
    run.record.flush()
    write_timeline(run)
    if control.rank == 0:
        step = run.step if outcome == FINISHED else run.checkpointer.published
        record = Outcome(outcome, step, run.why_over if outcome == FINISHED else "")
        write(attempt.outcome, record, patience=WRITE_PATIENCE_S)
    run.writer.close()
    control.barrier()  # no rank leaves before the outcome is on disk
    return outcome


def note_kernels(attempt: Attempt, config: RunConfig, made_of: Implementation, platform: Device) -> None:
    """Record the kernels that the device uses in the log and in kernels.json. A failed write is only logged."""
    _, page_tokens = pages_of(config.inference, config.page_tokens, config.sequence_length)
    tp = config.placement.inference.tp or config.placement.training.tp
    against = why_not_recorded(platform.kernels, config.model, config.inference, page_tokens, tp=tp)
    decoding = "graphs, one for each number of rows" if against is None else f"operation by operation: {against}"
    experts = experts_in_words(platform, config)
    kernels = UsedKernels(
        made_of.name, made_of.reason, platform.kernels.attention_kernels, made_of.fp8, decoding, experts
    )
    logger.info("transformer_impl: %s (%s); attention: %s; fp8: %s; decoding: %s; experts: %s", *kernels)
    try:
        write(attempt.kernels, kernels)
    except OSError as error:
        logger.warning("%s: %s", attempt.kernels, error)


def experts_in_words(platform: Device, config: RunConfig) -> str:
    """Describe how the training ranks multiply experts. A tensor-parallel group shares each expert."""
    model = config.model
    if model.expert_ffn_hidden_size is None:
        return "none"
    ffn = model.expert_ffn_hidden_size // config.placement.training.tp
    against = experts_one_by_one(platform.kernels, DTYPES[model.dtype], model.hidden_size, ffn)
    return "all at once" if against is None else f"one by one: {against}"


def write_timeline(run: Run, resumed: int | None = None) -> None:
    """Write a line of the attempt's timeline: the seconds of each phase since the last line. Collective.

    resumed: step that the attempt resumed from, for its first line.
    """
    tally, timeline = Tally(), run.safe_points.timeline
    timeline.tally(tally)
    with timeline.phase("wait"):
        reduced = tally.reduce(run.groups.control)
    run.writer.timeline(timeline.line(reduced, run.step, resumed))


def finish_save(safe_points: SafePoints, checkpointer: Checkpointer) -> None:
    """Wait for the last save of the run, at most save.timeout_s.

    Raises CheckpointError if it fails: without it the run is not finished.
    """
    while checkpointer.saving is not None:
        checkpointer.wait(until=time.monotonic() + POLL_S)
        safe_points.poll()
    checkpointer.wait(final=True)


def leave(run: Run, run_dir: RunDir) -> None:
    """Wait for the save in progress, then save newer work, each if there is time. Collective.

    A save that passes the deadline is abandoned; the checkpoint before it and the bank remain. A failed save is tried
    once more: the disk may have room by now.
    """
    finish_write(run)
    control, due = run.groups.control, False
    # Rank 0 decides: the other ranks may not know yet whether a save failed.
    if control.rank == 0 and run.step > run.checkpointer.newest and run.trainer.between_steps:
        due = time_to_save(run_dir, run.checkpointer, run.safe_points.drain)
    if control.share(due):
        begin_save(run)
        finish_write(run)


def finish_write(run: Run) -> None:
    """Wait until the save in progress is written; abandon it at the deadline."""
    safe_points, checkpointer = run.safe_points, run.checkpointer
    first = run.groups.control.rank == 0
    while checkpointer.saving is not None:
        left_s = safe_points.drain.left_s() if first else None  # None while the host does not know it
        if left_s is not None and left_s < MARGIN_S:
            checkpointer.abandon("no time is left")
        checkpointer.wait(until=time.monotonic() + POLL_S)
        safe_points.poll()


def time_to_save(run_dir: RunDir, checkpointer: Checkpointer, drain: DrainListener) -> bool:
    """Whether a save fits before the deadline, judged by the duration of the last save or, before the first one, by the
    plan's estimate from the cluster profile's fs_bandwidth. Without an estimate, true."""
    plan = if_readable(read(PlanRecord, run_dir.plan))
    planned = plan and plan.checkpoint.seconds
    seconds = checkpointer.estimate_s() or planned or 0.0
    left_s = drain.left_s()
    can = fits(left_s, seconds)
    if not can and left_s is not None:
        logger.warning("no time for a checkpoint: one takes about %.0f s, %.0f s are left", seconds, left_s)
    return can
