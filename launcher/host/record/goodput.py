"""GPU usage of a run (`accounting`): read from its files."""

from __future__ import annotations

from launcher.host.record.accounting import AttemptTrace, GpuUsage, gpu_usage, in_queue, is_own
from launcher.host.record.ledger import ends_in, read_ledger
from megatron_rl.contract.attempt_records import Drain, Heartbeat, Marks, TimelineLine
from megatron_rl.contract.paths import INFER, Attempt, RunDir
from megatron_rl.contract.records import Unreadable, UnreadableRecord, if_readable, read, read_lines, write
from megatron_rl.contract.run_records import Owner, PlanRecord


def read_usage(run: RunDir, now: float, running: bool = False, queued: bool = False) -> GpuUsage:
    """Present usage of a run, whose newest attempt runs, or whose job waits in the queue. Raises OSError where its
    ledger or a timeline cannot be read: without them used time would count as lost."""
    ledger = read_ledger(run, patience=0.0)
    ended = {end.attempt for end in ends_in(ledger) if is_own(end)}
    traces = {line.attempt: _trace(run.attempt(line.attempt), line.attempt in ended) for line in ledger}
    owner = if_readable(read(Owner, run.job)) if queued else None
    plan = if_readable(read(PlanRecord, run.plan)) if owner else None
    gpus = (plan.nodes + plan.spare_nodes) * plan.gpus_per_node if plan else 0
    waiting = in_queue(owner.job_id, owner.submitted_at, gpus, now) if owner else None
    return gpu_usage(ledger, traces, now, running, waiting)


def mark(attempt: Attempt, **times: float) -> None:
    """Record when the container image of an attempt was available (`image`), and when its nodes were chosen and its
    ranks about to start (`ready`). Raises OSError."""
    write(attempt.marks, _marks(attempt)._replace(**times))


def generating_gpus(plan: PlanRecord) -> int:
    """Number of the GPUs that only generate."""
    replicas = [step for step in plan.steps if step.name.startswith(INFER + "-") and not step.shares_devices]
    return sum(len(step.nodes) * step.gpus_per_node for step in replicas)


def _marks(attempt: Attempt) -> Marks:
    return if_readable(read(Marks, attempt.marks)) or Marks()


def _trace(attempt: Attempt, ended: bool) -> AttemptTrace:
    timeline = read_lines(TimelineLine, attempt.timeline)
    if isinstance(timeline, Unreadable):
        raise UnreadableRecord(str(timeline))
    marks, drain = _marks(attempt), if_readable(read(Drain, attempt.drain))
    beat = None if ended else if_readable(read(Heartbeat, attempt.heartbeat(0)))
    return AttemptTrace(
        timeline=timeline.records,
        image=marks.image,
        ready=marks.ready,
        asked=drain.at if drain else None,
        left=attempt.outcome.exists(),
        seen=beat.written if beat else None,
    )
