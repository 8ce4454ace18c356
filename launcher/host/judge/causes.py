"""Pure: why Slurm signals a job, or how it ended, by Slurm's own record. Nothing is guessed from the clock."""

from __future__ import annotations

import re
from typing import NamedTuple

from launcher.host.slurm.formats import CLOCK_S, ENDED, seconds_of, time_of
from megatron_rl.contract.attempt_records import Drain
from megatron_rl.contract.codes import CANCELLED, NODE_FAILURE, PREEMPTED, REQUEUE, SIGNALLED, TIME_LIMIT
from megatron_rl.contract.text import whole_number

OF_ENDED = {
    "PREEMPTED": PREEMPTED,
    "TIMEOUT": TIME_LIMIT,
    "NODE_FAIL": NODE_FAILURE,
    "BOOT_FAIL": NODE_FAILURE,
    "CANCELLED": CANCELLED,
    "REQUEUED": REQUEUE,
}
"""State of an ended job -> cause. Any other state does not explain why its script was killed."""

OF_STEPD = {"PREEMPTION": PREEMPTED, "TIME LIMIT": TIME_LIMIT, "NODE FAILURE": NODE_FAILURE, "JOB REQUEUE": REQUEUE}
"""Reason in slurmstepd's message when it ends a batch script -> cause."""

ALIVE = ("RUNNING", "COMPLETING", "CONFIGURING", "SIGNALING", "STOPPED", "SUSPENDED")
"""States in which an end time in the past means scancel. States of later versions may mean something else."""

# `slurmstepd-node01: error: *** JOB 6 ON node01 CANCELLED AT 2026-11-21T14:45:00 DUE TO PREEMPTION ***`
_ENDED_BY_STEPD = re.compile(r"\*\*\* JOB (\d+)\b.* CANCELLED AT (\S+)(?: DUE TO ([A-Z ]*[A-Z]))?")

EARLY_S = 90.0  # seconds; Slurm may send the signal of --signal up to a minute early

TO_BATCH_HOST = "{} to the batch host"  # Drain.by of a signal to the host side
TO_STEPS = "a signal to the steps"  # Drain.by of a signal that only the ranks got


class Cause(NamedTuple):
    cause: str
    end: float | None  # unix time at which Slurm ends, or ended, the job


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
        notice: seconds before the time limit at which Slurm signals the job (`--signal`).
        restarts: number of requeues of the job when this attempt began.
        end_before: end of the job in an earlier record.
        cancels: whether a preemption ends this job for good, instead of requeueing it; None: unknown.
    """
    start, end, limit = time_of(job.get("StartTime")), time_of(job.get("EndTime")), seconds_of(job.get("TimeLimit"))
    state = job.get("JobState", "")
    preempted = time_of(job.get("PreemptTime")) is not None
    if state == "PENDING" or is_returning(job, restarts):
        return Cause(PREEMPTED if preempted else REQUEUE, end)  # a requeue may also be the user's `scontrol requeue`
    # scancel moves the end of a job to now; its state may say no more than COMPLETING. So an end in the past means a
    # cancellation, but not in every state: a job that reached its limit, or whose node died, has one too, so its state
    # is looked at first. An end that is past, and before the one that an earlier record showed (`end_before`), means
    # that somebody has cancelled the job meanwhile, even in the grace time of a preemption.
    over = end is not None and end <= now
    earlier = over and end is not None and end_before is not None and end < end_before - CLOCK_S
    if state in OF_ENDED:
        return Cause(OF_ENDED[state], end)
    if earlier and state in ALIVE:
        return Cause(CANCELLED, end)
    if preempted:
        # The end of the grace time requeues a job, unless preemption cancels it. Before that end a preempted job is
        # RUNNING, SIGNALING (until its nodes have confirmed the signal) or SUSPENDED.
        is_over = state == "COMPLETING" or state in ENDED
        if is_over and cancels is None:
            return Cause(SIGNALLED, end)
        return Cause(CANCELLED if is_over and not cancels else PREEMPTED, end)
    if start is not None and end is not None and limit is not None and abs(start + limit - end) <= CLOCK_S:
        return Cause(TIME_LIMIT, end) if end - now <= notice + EARLY_S else Cause(SIGNALLED, end)
    return Cause(CANCELLED if over and state in ALIVE else SIGNALLED, end)


def cause_in_log(text: str, job_id: str, since: float) -> str | None:
    """Why Slurm ended the script of a job, by the message that slurmstepd writes first, since this attempt began. It
    may be the only trace: a preemption without grace leaves none in the record of the requeued job, and not every site
    has accounting."""
    cause = None
    for job, at, why in _ENDED_BY_STEPD.findall(text):
        known = not why or why in OF_STEPD
        if job == job_id and known and (time_of(at) or 0.0) >= since - CLOCK_S:
            cause = OF_STEPD.get(why)
    return cause


def is_returning(job: dict[str, str], restarts: int) -> bool:
    return (whole_number(job.get("Restarts")) or 0) > restarts


def has_script(job: dict[str, str]) -> bool:
    """Whether a job has a batch script, which can start again; True where Slurm does not say.

    BatchFlag is 0 for an interactive allocation. For a batch job it is 1, and rises by 1 whenever Slurm requeues the
    job by itself: after a failed launch and, from 24.05 on, when a preempted job ends in its grace time."""
    return job.get("BatchFlag") != "0"


def is_requeueable(job: dict[str, str]) -> bool:
    return job.get("Requeue") != "0"


def is_ending(job: dict[str, str]) -> bool:
    preempted, start = time_of(job.get("PreemptTime")), time_of(job.get("StartTime"))
    in_grace = preempted is not None and start is not None and preempted >= start
    return in_grace or job.get("JobState") in ("COMPLETING", "CANCELLED", "PREEMPTED")


def is_truer(cause: str, named: str) -> bool:
    """Whether the cause at the end of an attempt replaces the one named before: that was unknown, or a requeue that
    turns out to be a preemption's, or the job has been cancelled since."""
    return named == SIGNALLED or cause == CANCELLED or (named, cause) == (REQUEUE, PREEMPTED)


def is_complete(request: Drain) -> bool:
    return request.cause != SIGNALLED and request.deadline is not None


def is_unexplained(request: Drain) -> bool:
    return request.cause == SIGNALLED and not request.by.endswith(TO_BATCH_HOST.format(""))


def completed(request: Drain, cause: Cause, deadline: float | None) -> Drain:
    """Complete a request to leave by Slurm's record: the cause if it has none, and the end. `deadline` is the unix time
    at which the job will have ended."""
    return request._replace(
        cause=request.cause if request.cause != SIGNALLED else cause.cause,
        deadline=deadline if request.deadline is None else request.deadline,
        end=cause.end if request.end is None else request.end,
    )
