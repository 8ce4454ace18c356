"""Pure: why an attempt was asked to leave, and what becomes of the job when it has ended."""

import re
import time
from typing import Any, Dict, NamedTuple, Optional, Sequence

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

# Attempts in a row with nothing to show, after which somebody should look. Preemptions do not count: nobody made a
# mistake, and they end.
IN_VAIN = {BAD_NODES: 5, TIME_LIMIT: 3}

EARLY = 90.0  # seconds: Slurm may send the signal of --signal up to a minute early
CLOCK = 5.0  # seconds by which times of one record may differ
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


def cause_of(
    job: Dict[str, str], now: float, notice: float, restarts: int = 0, deadline: Optional[float] = None
) -> Cause:
    """Why Slurm signals a job, as its record has it.

    Args:
        job: fields of `scontrol show job`.
        notice: seconds before the time limit at which the job wants to be told (`--signal`).
        restarts: how often the job had been requeued when this attempt began.
        deadline: the end that Slurm had set when it was asked before.
    """
    start, end, limit = _time(job.get("StartTime")), _time(job.get("EndTime")), _seconds(job.get("TimeLimit"))
    state = job.get("JobState")
    if state == "PENDING" or int(job.get("Restarts", "0")) > restarts:
        return Cause(REQUEUE, end)  # somebody's `scontrol requeue`
    # scancel moves the end of a job to now, and its state may already say no more than COMPLETING.
    over = end is not None and end <= now
    if state == "CANCELLED" or (over and end is not None and deadline is not None and end < deadline - CLOCK):
        return Cause(CANCELLED, end)
    if state == "PREEMPTED" or _time(job.get("PreemptTime")) is not None:
        return Cause(PREEMPTED, end)
    if start is not None and end is not None and limit is not None and abs(start + limit - end) <= CLOCK:
        return Cause(TIME_LIMIT, end) if end - now <= notice + EARLY else Cause(SIGNALLED, end)
    return Cause(CANCELLED if over else SIGNALLED, end)


def decide(
    verdict: Verdict,
    drain: Optional[Dict[str, Any]],
    may_requeue: bool,
    slurm: Sequence[int],
    in_a_row: int = 0,
) -> Decision:
    """What to do with the job of an attempt that ended.

    Args:
        drain: the attempt's drain file.
        may_requeue: whether the job can be requeued at all: not inside somebody's own allocation.
        slurm: version of Slurm as numbers.
        in_a_row: attempts just before this one that ended for the same cause with nothing new saved.
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
    if verdict.step is None and in_a_row + 1 >= IN_VAIN.get(str(cause), in_a_row + 2):
        said = "{} attempts in a row ended with nothing new saved ({})".format(in_a_row + 1, cause)
        return Decision(CRASHED, False, EXIT_CRASHED, said)
    if not may_requeue:
        return Decision(DRAINED, False, EXIT_DRAINED, "{} ({}); submit the run again to go on".format(saved, cause))
    if cause == PREEMPTED and list(slurm) >= REQUEUES_PREEMPTED_ITSELF:
        return Decision(DRAINED, False, EXIT_DRAINED, "{} ({}); Slurm requeues this job".format(saved, cause))
    return Decision(DRAINED, True, EXIT_DRAINED, "{} ({}); requeueing".format(saved, cause))


def _seconds(text: Optional[str]) -> Optional[float]:
    """Seconds of Slurm's `1-02:00:00` or `04:00:00`; None for UNLIMITED."""
    found = re.match(r"^(?:(\d+)-)?(\d+):(\d+):(\d+)$", text or "")
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _time(text: Optional[str]) -> Optional[float]:
    """Unix time of Slurm's `2026-11-21T07:00:00`; None for None, Unknown and N/A."""
    try:
        return time.mktime(time.strptime(text or "", "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None
