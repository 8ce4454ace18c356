"""Pure: why Slurm signals a job, or how it ended, as Slurm's record has it. Nothing is guessed from the clock."""

from __future__ import annotations

import re
from typing import NamedTuple

from launcher.host.slurm.formats import CLOCK_S, ENDED, seconds_of, time_of
from megatron_rl.contract.attempt_records import Drain
from megatron_rl.contract.codes import CANCELLED, NODE_FAILURE, PREEMPTED, REQUEUE, SIGNALLED, TIME_LIMIT

OF_ENDED = {
    "PREEMPTED": PREEMPTED,
    "TIMEOUT": TIME_LIMIT,
    "NODE_FAIL": NODE_FAILURE,
    "BOOT_FAIL": NODE_FAILURE,
    "CANCELLED": CANCELLED,
    "REQUEUED": REQUEUE,
}
"""Slurm's word for how a job ended -> cause; any other word says nothing of why its script was killed."""

OF_STEPD = {
    "PREEMPTION": PREEMPTED,
    "TIME LIMIT": TIME_LIMIT,
    "NODE FAILURE": NODE_FAILURE,
    "JOB REQUEUE": REQUEUE,
}
"""slurmstepd's words for why it ends a batch script -> cause."""

ALIVE = ("RUNNING", "COMPLETING", "CONFIGURING", "SIGNALING", "STOPPED", "SUSPENDED")
"""States in which an end that has passed is the doing of scancel. A word of a later version may mean something else."""

# `slurmstepd-node01: error: *** JOB 6 ON node01 CANCELLED AT 2026-11-21T14:45:00 DUE TO PREEMPTION ***`
_ENDED_BY_STEPD = re.compile(r"\*\*\* JOB (\d+)\b.* CANCELLED AT (\S+)(?: DUE TO ([A-Z ]*[A-Z]))?")

EARLY_S = 90.0  # Slurm may send the signal of --signal up to a minute early

TO_BATCH_HOST = "{} to the batch host"  # Drain.by of a signal that the host side got itself
TO_STEPS = "a signal to the steps"  # Drain.by of what the host side only saw the ranks leave for


class Cause(NamedTuple):
    """What Slurm's record says about a signal."""

    cause: str
    end: float | None  # unix time at which Slurm ends the job, or has


def cause_of(
    job: dict[str, str],
    now: float,
    notice: float,
    restarts: int = 0,
    end_before: float | None = None,
    cancels: bool | None = False,
) -> Cause:
    """Why Slurm signals a job.

    Args:
        job: fields of `scontrol show job`.
        notice: seconds before the time limit at which the job wants to be told (`--signal`).
        restarts: how often the job had been requeued when this attempt began.
        end_before: the end that Slurm had set when it was asked before.
        cancels: whether a preemption ends this job for good, instead of requeueing it; None: not known.
    """
    start, end, limit = time_of(job.get("StartTime")), time_of(job.get("EndTime")), seconds_of(job.get("TimeLimit"))
    state = job.get("JobState", "")
    preempted = time_of(job.get("PreemptTime")) is not None
    if state == "PENDING" or is_returning(job, restarts):
        return Cause(PREEMPTED if preempted else REQUEUE, end)  # or somebody's `scontrol requeue`
    # scancel moves the end of a job to now, and its state may already say no more than COMPLETING.
    over = end is not None and end <= now
    earlier = over and end is not None and end_before is not None and end < end_before - CLOCK_S
    if state in OF_ENDED:
        return Cause(OF_ENDED[state], end)
    if earlier and state in ALIVE:
        return Cause(CANCELLED, end)
    if preempted:
        # The end of the grace time requeues a job, unless preemption cancels: then only the times tell the two apart.
        # One that lives is RUNNING, or SIGNALING until its nodes have confirmed the signal, or SUSPENDED.
        is_over = state == "COMPLETING" or state in ENDED
        if is_over and cancels is None:
            return Cause(SIGNALLED, end)
        return Cause(CANCELLED if is_over and not cancels else PREEMPTED, end)
    if start is not None and end is not None and limit is not None and abs(start + limit - end) <= CLOCK_S:
        return Cause(TIME_LIMIT, end) if end - now <= notice + EARLY_S else Cause(SIGNALLED, end)
    return Cause(CANCELLED if over and state in ALIVE else SIGNALLED, end)


def cause_in_log(text: str, job_id: str, since: float) -> str | None:
    """Why Slurm ended the script of a job: its slurmstepd says so before it does. Nobody else may know: a preemption
    without grace leaves no trace in the job's record once that is requeued, and accounting is not everywhere.

    Args:
        text: of the batch log, whose times are in the zone of the host.
        since: when the attempt began; the log is one for all.
    """
    cause = None
    for told, at, why in _ENDED_BY_STEPD.findall(text):
        known = not why or why in OF_STEPD
        if told == job_id and known and (time_of(at) or 0.0) >= since - CLOCK_S:
            cause = OF_STEPD.get(why)
    return cause


def is_returning(job: dict[str, str], restarts: int) -> bool:
    """Whether Slurm has taken the job back into the queue since this attempt of it began."""
    told = job.get("Restarts", "")
    return told.isdigit() and int(told) > restarts


def has_script(job: dict[str, str]) -> bool:
    """Whether a job has a batch script, which can start again; assumed where Slurm does not say otherwise.

    BatchFlag is 0 for an allocation that somebody works in. For a batch job it is 1 and rises by 1 whenever Slurm
    requeues the job by itself: after a failed launch and, from 24.05 on, when a preempted job ends in its grace time.
    """
    return job.get("BatchFlag") != "0"


def is_requeueable(job: dict[str, str]) -> bool:
    """Whether a job may be requeued; assumed where Slurm does not say otherwise, as trying does no harm."""
    return job.get("Requeue") != "0"


def is_ending(job: dict[str, str]) -> bool:
    """Whether Slurm has told the processes of a job that still runs to end, or will soon, after its grace time."""
    preempted, start = time_of(job.get("PreemptTime")), time_of(job.get("StartTime"))
    told = preempted is not None and start is not None and preempted >= start
    return told or job.get("JobState") in ("COMPLETING", "CANCELLED", "PREEMPTED")


def is_truer(cause: str, named: str) -> bool:
    """Whether what Slurm says at the end of an attempt counts for more than the cause named before: that was none, or a
    requeue that turns out to be a preemption's, or the job was cancelled since."""
    return named == SIGNALLED or cause == CANCELLED or (named, cause) == (REQUEUE, PREEMPTED)


def is_complete(request: Drain) -> bool:
    """Whether a request to leave says all there is to say."""
    return request.cause != SIGNALLED and request.deadline is not None


def is_unexplained(request: Drain) -> bool:
    """Whether ranks alone know of a request to leave: a signal reached them, and nobody else says why."""
    return request.cause == SIGNALLED and not request.by.endswith(TO_BATCH_HOST.format(""))


def completed(request: Drain, cause: Cause, deadline: float | None) -> Drain:
    """A request to leave with what Slurm's record adds to it: the cause where nobody named one, and the end.

    Args:
        deadline: unix time at which the job will be gone.
    """
    return request._replace(
        cause=request.cause if request.cause != SIGNALLED else cause.cause,
        deadline=deadline if request.deadline is None else request.deadline,
        end=cause.end if request.end is None else request.end,
    )
