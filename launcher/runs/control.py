"""Control of a run from outside: save and leave, leave at once, come back elsewhere."""

from __future__ import annotations

import os
import time

from launcher.errors import BadInput, Failed
from launcher.host.slurm import tell
from launcher.host.slurm.call import SlurmRefused
from launcher.runs.find import pasteable_command
from launcher.runs.state import UNSURE, RunStatus, last_line, resolved_values
from megatron_rl.contract.attempt_records import AttemptStart, Drain
from megatron_rl.contract.codes import CANCELLED, REQUEUE
from megatron_rl.contract.records import if_readable, read, write

DRAIN_MARGIN_S = 60  # beside the save itself: the step that is under way
SAVE_LIMIT_S = 600.0  # of a save, where the recipe of the run does not say it


def cancel(status: RunStatus, drain: bool) -> str:
    """End a run that is alive; says what was done.

    Args:
        drain: let it save first, if it has begun.

    Raises:
        Failed: it could not be done, or whether the run is alive is not known.
    """
    _refuse_unsure(status)
    job = status.job
    if job is None:
        limit = _save_limit_s(status) if drain else 0.0
        _ask_to_leave(status, CANCELLED, limit)
        return f"saving, then leaving, within {limit:.0f} s" if drain else "killed"
    begun = _has_open_attempt(status)
    if drain and begun:
        _ask_to_leave(status, CANCELLED, None)
        return f"job {job.job_id} was asked to save and to leave; it will not be requeued{_signal(job.job_id)}"
    if not job.batch:
        if not begun:
            raise Failed(f"{status.name}: job {job.job_id} is an allocation that somebody works in; it stays")
        _ask_to_leave(status, CANCELLED, 0.0)
        return f"its ranks are ended; the allocation, job {job.job_id}, stays"
    if begun:  # or a drain that is under way for another cause would bring the job back
        _ask_to_leave(status, CANCELLED, None)
    _scancel(job.job_id)
    return f"job {job.job_id} is cancelled" + (", it had nothing to save" if drain else "")


def requeue(status: RunStatus, now: bool) -> str:
    """Give the nodes back and wait in the queue again; says what was done.

    Args:
        now: without saving first.

    Raises:
        Failed: it could not be done, or whether the run is alive is not known.
    """
    _refuse_unsure(status)
    job, resume = status.job, pasteable_command("resume", status.name)
    if job is None:
        raise Failed(f"{status.name}: is a local run, which no queue holds; stop it and {resume}")
    if not job.batch:
        raise Failed(f"{status.name}: runs in an allocation, job {job.job_id}, which no queue holds")
    if job.kind == "pending":
        raise Failed(f"{status.name}: job {job.job_id} is in the queue already")
    if job.kind != "running":
        raise Failed(f"{status.name}: is {status.state}; {resume} submits it again")
    request = if_readable(read(Drain, status.run.attempt(status.attempt).drain))
    if request and request.cause == CANCELLED and not now:
        raise Failed(f"{status.name}: is being cancelled; {resume} once it has ended")
    if now or not _has_open_attempt(status):
        try:
            tell.requeue(job.job_id)
        except SlurmRefused as error:
            raise Failed(f"{status.name}: {error}") from error
        return f"job {job.job_id} is requeued; it goes on from its newest checkpoint"
    _ask_to_leave(status, REQUEUE, None)
    return f"job {job.job_id} was asked to save; then it is requeued{_signal(job.job_id)}"


def _refuse_unsure(status: RunStatus) -> None:
    if status.state in UNSURE:
        raise Failed(f"{status.name}: {status.reason}")


def _has_open_attempt(status: RunStatus) -> bool:
    """Whether ranks of this very job may be at work: else there is nobody to hear and nothing to save."""
    last, job = last_line(status.run), status.job
    return job is not None and job.kind == "running" and isinstance(last, AttemptStart) and last.job_id == job.job_id


def _ask_to_leave(status: RunStatus, cause: str, limit_s: float | None) -> None:
    """Write why, or write it instead of an earlier cause, whose deadline is still that of the job.

    Args:
        limit_s: seconds from now to the deadline; None: the job's own.
    """
    attempt, at = status.run.attempt(status.attempt), time.time()
    before = if_readable(read(Drain, attempt.drain))
    deadline = (before.deadline if before else None) if limit_s is None else at + limit_s
    by = f"{os.environ.get('USER', 'somebody')}, mrl {os.getpid()}"
    try:
        write(attempt.drain, Drain(cause, by, at, deadline, before.end if before else None))
    except OSError as error:
        raise Failed(f"{status.name}: {attempt.drain}: {error.strerror}") from error


def _signal(job_id: str) -> str:
    """The batch host reminds the ranks every few seconds, so a signal that is lost here only costs time."""
    try:
        tell.signal_steps(job_id, "USR1")
    except SlurmRefused as error:
        return f" (its steps could not be signalled from here: {error})"
    return ""


def _scancel(job_id: str) -> None:
    try:
        tell.cancel(job_id)
    except SlurmRefused as error:
        raise Failed(f"job {job_id}: {error}") from error


def _save_limit_s(status: RunStatus) -> float:
    try:
        save = resolved_values(status.run).get("save")
    except BadInput:
        save = None
    limit = save.get("timeout_s") if isinstance(save, dict) else None
    return float(limit if isinstance(limit, int | float) else SAVE_LIMIT_S) + DRAIN_MARGIN_S
