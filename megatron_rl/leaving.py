"""Before the exit: what is still saved, and how long that may take."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_rl.checkpoint.save import Checkpointer
from megatron_rl.contract.codes import MARGIN_S
from megatron_rl.contract.paths import RunDir
from megatron_rl.rank.drain import DrainListener, fits
from megatron_rl.rank.safe_points import LOOK_EVERY_S, SafePoints
from megatron_rl.run import Run
from megatron_rl.run_dir import read_json

logger = logging.getLogger(__name__)


def finish(safe_points: SafePoints, checkpointer: Checkpointer) -> None:
    """See the last save of the run through, which has until save.timeout_s.

    Raises CheckpointError where it fails: without it the run is not finished.
    """
    while checkpointer.under_way is not None:
        checkpointer.wait(until=time.monotonic() + LOOK_EVERY_S)
        safe_points.poll()
    checkpointer.wait(final=True)


def leave(run: Run, run_dir: RunDir, checkpointer: Checkpointer, save: Callable[[], None]) -> None:
    """See the write that is under way through, and save what is newer than it, each if there is time. Collective.

    A save that the deadline overtakes is given up: the checkpoint before it and the bank are what stays. One that
    failed is tried once more: there may be room for it by now.
    """
    _see_through(run.safe_points, checkpointer)
    flag = torch.zeros(1, dtype=torch.int32)
    # Rank 0 decides: the others may not know yet what became of a save.
    if dist.get_rank() == 0 and run.step > checkpointer.newest and run.trainer.between_steps:
        flag += _time_to_save(run_dir, checkpointer, run.safe_points.drain)
    dist.broadcast(flag, src=0, group=run.groups.control)
    if flag.item():
        save()
        _see_through(run.safe_points, checkpointer)


def _see_through(safe_points: SafePoints, checkpointer: Checkpointer) -> None:
    """Until nothing is being written, or the deadline is there."""
    first = dist.get_rank() == 0
    while checkpointer.under_way is not None:
        deadline = safe_points.drain.deadline() if first else None  # the host side may still be finding out
        if deadline is not None and time.time() > deadline - MARGIN_S:
            checkpointer.abandon("there is no time left")
        checkpointer.wait(until=time.monotonic() + LOOK_EVERY_S)
        safe_points.poll()


def _time_to_save(run_dir: RunDir, checkpointer: Checkpointer, drain: DrainListener) -> bool:
    """Whether a save fits before the deadline, by how long the last one took; before the first, by what it should
    take according to the plan and the cluster profile's fs_bandwidth. Where nobody knows it is tried."""
    planned = ((read_json(run_dir.plan) or {}).get("checkpoint") or {}).get("seconds")
    seconds = checkpointer.estimate_s() or planned or 0.0
    deadline = drain.deadline()
    can = fits(time.time(), deadline, seconds)
    if not can and deadline is not None:
        logger.warning(
            "no time for a checkpoint: one takes about %.0f s, %.0f s are left", seconds, deadline - time.time()
        )
    return can
