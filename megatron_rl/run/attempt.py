"""One attempt on one rank, from its configuration to its outcome: connect, set up, train, save what there is to save.

Ranks leave only together, after the outcome is on the disk: an exit code alone proves nothing.
"""

from __future__ import annotations

import logging
import time

import torch
import torch.distributed as dist

import megatron_rl.platform.megatron_core  # noqa: F401  before the modules below import megatron-core themselves
from megatron_rl.checkpoint.save import Checkpointer
from megatron_rl.config import RunConfig, read_config
from megatron_rl.contract.attempt_records import Kernels, Outcome
from megatron_rl.contract.codes import DRAINED, FINISHED, MARGIN_S
from megatron_rl.contract.files import names_in, once_there_is_room
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.records import if_readable, read, write
from megatron_rl.contract.run_records import PlanRecord
from megatron_rl.inference.config import pages_of
from megatron_rl.inference.decode_graphs import why_not_recorded
from megatron_rl.metrics.stats import Tally
from megatron_rl.metrics.timeline import Timeline
from megatron_rl.metrics.wandb.mirror import check_installed
from megatron_rl.platform.api import Platform
from megatron_rl.platform.implementation import Implementation, choose_implementation
from megatron_rl.platform.select import select
from megatron_rl.rank.activity import Activity
from megatron_rl.rank.drain import DrainListener, fits, leave_early
from megatron_rl.rank.groups import connect, disconnect
from megatron_rl.rank.safe_points import POLL_S, LeaveAgreed, SafePoints
from megatron_rl.rank.world import World
from megatron_rl.run.setup import Run, set_up
from megatron_rl.train_rl import begin_save, save_metrics, train

logger = logging.getLogger("megatron_rl")


def run_attempt(
    run_dir: RunDir, attempt: Attempt, world: World, activity: Activity, drain: DrainListener, timeline: Timeline
) -> str:
    """Everything between start and exit of a rank. Returns FINISHED or DRAINED, once rank 0 has written so."""
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
        run = set_up(run_dir, attempt, config, platform, groups, safe_points)
    except LeaveAgreed:
        leave_early(attempt, world.rank, drain)
        return DRAINED
    except RuntimeError:
        # A request that comes while the ranks meet may find one that has not met the others yet. It leaves by itself,
        # and the connection to it is lost.
        if not (drain.asked or attempt.outcome.name in names_in(attempt.folder)):
            raise
        leave_early(attempt, world.rank, drain)
        return DRAINED
    write_timeline(run, resumed=run.step)

    timeline.switch("train")
    outcome = train(run)
    run.driver.stop()
    run.generation.end()
    activity.enter("saving", run.step)
    if outcome == FINISHED:
        with safe_points.phase("save"):
            finish(safe_points, run.checkpointer)
    else:
        with safe_points.phase("drain"):
            leave(run, run_dir)
    save_metrics(run)
    if outcome == FINISHED:
        finish_export(run)
    run.exporter.close()
    run.driver.close()
    write_timeline(run)
    if world.rank == 0:
        step = run.step if outcome == FINISHED else run.checkpointer.published
        once_there_is_room(attempt.outcome, lambda: write(attempt.outcome, Outcome(outcome, step)))
    run.writer.close()
    dist.barrier(groups.control)  # nobody leaves before the outcome is on disk
    disconnect()
    return outcome


def note_kernels(attempt: Attempt, config: RunConfig, made_of: Implementation, platform: Platform) -> None:
    """Say what the device's work is done by, in the log and in kernels.json, for whoever reads the run later: a disk
    that does not take it costs nothing else."""
    _, page_tokens = pages_of(config.inference, config.page_tokens, config.sequence_length)
    fp8 = made_of.fp8 is not None
    against = why_not_recorded(platform, config.model, config.inference, page_tokens, fp8=fp8)
    decoding = "graphs, one for each number of rows" if against is None else f"operation by operation: {against}"
    kernels = Kernels(made_of.name, made_of.reason, platform.attention_kernels, made_of.fp8, decoding)
    logger.info("transformer_impl: %s (%s); attention: %s; fp8: %s; decoding: %s", *kernels)
    try:
        write(attempt.kernels, kernels)
    except OSError as error:
        logger.warning("%s: %s", attempt.kernels, error)


def write_timeline(run: Run, resumed: int | None = None) -> None:
    """Write where the time since the last line of the attempt's timeline went. Collective.

    Args:
        resumed: see Timeline.line.
    """
    tally, timeline = Tally(), run.safe_points.timeline
    timeline.tally(tally)
    total = tally.reduce(run.groups.control)
    run.writer.timeline(timeline.line(total, dist.get_world_size(run.groups.control), run.step, resumed))


def finish(safe_points: SafePoints, checkpointer: Checkpointer) -> None:
    """See the last save of the run through, which has until save.timeout_s.

    Raises CheckpointError where it fails: without it the run is not finished.
    """
    while checkpointer.under_way is not None:
        checkpointer.wait(until=time.monotonic() + POLL_S)
        safe_points.poll()
    checkpointer.wait(final=True)


def finish_export(run: Run) -> None:
    """See the exports of a finished run through, which have until save.timeout_s each, unless asked to leave. What had
    failed is tried once more; one that fails is said, and the run is finished all the same. Collective: nobody waits
    for rank 0 in another collective, which has a limit."""
    run.exporter.retry()
    flag = torch.ones(1, dtype=torch.int32)
    with run.safe_points.phase("save"):
        while flag.item():
            asked_to_leave = run.safe_points.poll()
            flag.fill_(run.exporter.busy and not asked_to_leave)
            dist.broadcast(flag, src=0, group=run.groups.control)
            time.sleep(POLL_S * flag.item())
    save_metrics(run)


def leave(run: Run, run_dir: RunDir) -> None:
    """See the write that is under way through, and save what is newer than it, each if there is time. Collective.

    A save that the deadline overtakes is given up: the checkpoint before it and the bank are what stays. One that
    failed is tried once more: there may be room for it by now.
    """
    see_through(run.safe_points, run.checkpointer)
    flag = torch.zeros(1, dtype=torch.int32)
    # Rank 0 decides: the others may not know yet what became of a save.
    if dist.get_rank() == 0 and run.step > run.checkpointer.newest and run.trainer.between_steps:
        flag += time_to_save(run_dir, run.checkpointer, run.safe_points.drain)
    dist.broadcast(flag, src=0, group=run.groups.control)
    if flag.item():
        begin_save(run)
        see_through(run.safe_points, run.checkpointer)


def see_through(safe_points: SafePoints, checkpointer: Checkpointer) -> None:
    """Wait until nothing is being written, or the deadline is there."""
    first = dist.get_rank() == 0
    while checkpointer.under_way is not None:
        deadline = safe_points.drain.deadline() if first else None  # the host side may still be finding out
        if deadline is not None and time.time() > deadline - MARGIN_S:
            checkpointer.abandon("there is no time left")
        checkpointer.wait(until=time.monotonic() + POLL_S)
        safe_points.poll()


def time_to_save(run_dir: RunDir, checkpointer: Checkpointer, drain: DrainListener) -> bool:
    """Whether a save fits before the deadline, by how long the last one took; before the first, by what it should
    take according to the plan and the cluster profile's fs_bandwidth. Where nobody knows it is tried."""
    plan = if_readable(read(PlanRecord, run_dir.plan))
    planned = plan and plan.checkpoint.seconds
    seconds = checkpointer.estimate_s() or planned or 0.0
    deadline = drain.deadline()
    can = fits(time.time(), deadline, seconds)
    if not can and deadline is not None:
        logger.warning(
            "no time for a checkpoint: one takes about %.0f s, %.0f s are left", seconds, deadline - time.time()
        )
    return can
