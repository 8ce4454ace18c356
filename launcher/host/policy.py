"""Pure: why an attempt was asked to leave, and what becomes of the job when it has ended."""

import time
from typing import Any, Dict, NamedTuple, Optional

from launcher.host.verdict import CRASHED, DRAINED, FINISHED, MISCONFIGURED, Verdict
from megatron_rl.run_dir import EXIT_CONFIG, EXIT_CRASHED, EXIT_DRAINED, EXIT_FINISHED

# Causes of a drain
CANCELLED = "cancelled"
REQUEUE = "requeue"
PREEMPTED = "preempted"
TIME_LIMIT = "time limit"
SIGNALLED = "signal"  # by somebody, and Slurm's record does not say why
BAD_NODES = "bad nodes"

STOPPED = "stopped"  # outcome of a drain that somebody wanted: never requeued

SLACK = 90.0  # seconds: Slurm may send the signal a minute early, and its clock is not ours
REQUEUES_PREEMPTED_ITSELF = [24, 5]  # Slurm versions from this one on requeue a preempted job whatever it exits with


class Cause(NamedTuple):
    """What Slurm's record says about a signal."""

    cause: str
    deadline: Optional[float]  # unix time at which the job will be gone


class Decision(NamedTuple):
    outcome: str  # for the ledger
    requeue: bool  # by us, with scontrol
    exit_code: int
    message: str


def cause_of(job: Dict[str, str], now: float, notice: float) -> Cause:
    """Why Slurm signals a job, as its record has it.

    Args:
        job: fields of `scontrol show job`.
        notice: seconds before the time limit at which the job wants to be told (`--signal`).
    """
    end = _time(job.get("EndTime"))
    state = job.get("JobState", "")
    if state == "CANCELLED":
        return Cause(CANCELLED, end)
    if state == "PREEMPTED" or _time(job.get("PreemptTime")) is not None:
        return Cause(PREEMPTED, end)
    if state == "TIMEOUT" or (end is not None and end - now <= notice + SLACK):
        return Cause(TIME_LIMIT, end)
    return Cause(SIGNALLED, None)


def decide(verdict: Verdict, drain: Optional[Dict[str, Any]], may_requeue: bool, slurm: Any) -> Decision:
    """What to do with the job of an attempt that ended.

    Args:
        drain: the attempt's drain file.
        may_requeue: whether the job can be requeued at all: not inside somebody's own allocation.
        slurm: version of Slurm as numbers.
    """
    cause = drain["cause"] if drain else None
    if verdict.outcome == FINISHED:
        return Decision(FINISHED, False, EXIT_FINISHED, "finished after step {}".format(verdict.step))
    if verdict.outcome == MISCONFIGURED:
        return Decision(MISCONFIGURED, False, EXIT_CONFIG, "wrong configuration: {}".format(verdict.error))
    if verdict.outcome == CRASHED:
        return Decision(CRASHED, False, EXIT_CRASHED, "crashed: {}".format(verdict.error))
    saved = "saved after step {}".format(verdict.step) if verdict.step else "left without a new checkpoint"
    if cause == CANCELLED:
        return Decision(STOPPED, False, EXIT_FINISHED, "stopped on request, {}; mrl resume goes on".format(saved))
    if not may_requeue:
        return Decision(DRAINED, False, EXIT_DRAINED, "{} ({}); submit the run again to go on".format(saved, cause))
    if cause == PREEMPTED and list(slurm) >= REQUEUES_PREEMPTED_ITSELF:
        return Decision(DRAINED, False, EXIT_DRAINED, "{} ({}); Slurm requeues this job".format(saved, cause))
    return Decision(DRAINED, True, EXIT_DRAINED, "{} ({}); requeueing".format(saved, cause))


def _time(text: Optional[str]) -> Optional[float]:
    """Unix time of Slurm's `2026-11-21T07:00:00`; None for None, Unknown and N/A."""
    try:
        return time.mktime(time.strptime(text or "", "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None
