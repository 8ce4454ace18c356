"""GPU usage of a run (`accounting`): read from its files."""

from __future__ import annotations

import sys
from functools import partial

from launcher.host.record.accounting import (
    AttemptTrace,
    GpuUsage,
    covers,
    gpu_usage,
    in_queue,
    is_own,
    kept_before,
)
from launcher.host.record.ledger import ends_in, read_ledger, starts_in
from megatron_rl.contract.attempt_records import Drain, Marks, TimelineLine
from megatron_rl.contract.heartbeat_files import read_heartbeat
from megatron_rl.contract.paths import INFER, Attempt, RunDir
from megatron_rl.contract.plan_records import PlanRecord, steps_of
from megatron_rl.contract.records import PATIENCE_S, Unreadable, UnreadableRecord, if_readable, read, write
from megatron_rl.contract.run_records import Owner
from megatron_rl.contract.tail import read_ends


def read_usage(run: RunDir, now: float, running: bool = False, queued: bool = False) -> GpuUsage:
    """Present usage of a run, whose newest attempt runs, or whose job waits in the queue. Raises OSError where its
    ledger or a timeline cannot be read: without them used time would count as lost."""
    ledger = read_ledger(run, patience=0.0)
    ended = {end.attempt for end in ends_in(ledger) if is_own(end)}
    traces: dict[int, AttemptTrace] = {}
    kept = sys.maxsize  # of the work of an attempt that is kept, the newest step: its traces are read from the end
    for start in reversed(starts_in(ledger)):
        trace = _trace(run.attempt(start.attempt), start.attempt in ended, kept)
        kept = kept_before(kept, trace)
        traces[start.attempt] = trace
    owner = if_readable(read(Owner, run.job)) if queued else None
    plan = if_readable(read(PlanRecord, run.plan)) if owner else None
    gpus = (plan.nodes + plan.spare_nodes) * plan.gpus_per_node if plan else 0
    waiting = in_queue(owner.job_id, owner.submitted_at, gpus, now) if owner else None
    return gpu_usage(ledger, traces, now, running, waiting)


def mark(attempt: Attempt, **times: float) -> None:
    """Record when the container image of an attempt was available (`image`), and when its nodes were chosen and its
    ranks about to start (`ready`). Raises OSError."""
    write(attempt.marks, _marks(attempt)._replace(**times), patience=PATIENCE_S)


def generating_gpus(plan: PlanRecord) -> int:
    """Number of the GPUs that only generate."""
    steps = steps_of(plan, plan.nodes)
    replicas = [step for step in steps if step.name.startswith(INFER + "-") and not step.shares_devices]
    return sum(len(step.nodes) * step.gpus_per_node for step in replicas)


def _marks(attempt: Attempt) -> Marks:
    return if_readable(read(Marks, attempt.marks)) or Marks()


def _trace(attempt: Attempt, ended: bool, kept: int) -> AttemptTrace:
    lines = read_ends(TimelineLine, attempt.timeline, lambda line: line.resumed is not None, partial(covers, kept=kept))
    if isinstance(lines, Unreadable):
        raise UnreadableRecord(str(lines))
    marks, drain = _marks(attempt), if_readable(read(Drain, attempt.drain))
    beat = None if ended else read_heartbeat(attempt.heartbeats, 0)
    return AttemptTrace(
        timeline=lines,
        image=marks.image,
        ready=marks.ready,
        asked=drain.at if drain else None,
        left=attempt.outcome.exists(),
        seen=beat.written if beat else None,
    )
