"""Control of a run from outside: save and leave, leave at once, come back elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from launcher.errors import BadInput, Failed
from launcher.host.slurm import orders
from launcher.host.slurm.call import SlurmRefused
from launcher.runs.find import pasteable_command
from launcher.runs.state import UNSURE, RunStatus, resolved_values
from megatron_rl.contract.attempt_records import LEDGER, AttemptStart, Drain
from megatron_rl.contract.codes import CANCELLED, REQUEUE
from megatron_rl.contract.records import (
    PATIENCE_S,
    Unreadable,
    UnreadableRecord,
    if_readable,
    read,
    read_lines,
    read_or_raise,
    write,
)

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
        _ask_to_leave(status, status.attempt, CANCELLED, limit)
        return f"saving, then leaving, within {limit:.0f} s" if drain else "killed"
    begun = _open_attempt(status) if drain else _attempt_to_warn(status)
    if drain and begun:
        _ask_to_leave(status, begun, CANCELLED, None)
        if job.kind == "pending":  # it was killed and has come back; or Slurm's answer is older than its start
            _tell(orders.cancel_waiting, job.job_id)
            return f"job {job.job_id} is cancelled; if it runs again already, it saves and leaves"
        return f"job {job.job_id} was asked to save and to leave; it will not be requeued{_signal(job.job_id)}"
    if not job.batch:
        if not begun:
            raise Failed(f"{status.name}: job {job.job_id} is an allocation that somebody works in; it stays")
        _ask_to_leave(status, begun, CANCELLED, 0.0)
        return f"its ranks are ended; the allocation, job {job.job_id}, stays"
    if begun:  # or a drain that is under way for another cause would bring the job back
        _ask_to_leave(status, begun, CANCELLED, None)
    _tell(orders.cancel, job.job_id)
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
    begun = None if now else _open_attempt(status)
    request = None if now else _request(status, begun or status.attempt)
    if request and request.cause == CANCELLED:
        raise Failed(f"{status.name}: is being cancelled; {resume} once it has ended")
    if begun is None:
        try:
            orders.requeue(job.job_id)
        except SlurmRefused as error:
            raise Failed(f"{status.name}: {error}") from error
        return f"job {job.job_id} is requeued; it goes on from its newest checkpoint"
    _ask_to_leave(status, begun, REQUEUE, None)
    return f"job {job.job_id} was asked to save; then it is requeued{_signal(job.job_id)}"


def _refuse_unsure(status: RunStatus) -> None:
    if status.state in UNSURE:
        raise Failed(f"{status.name}: {status.reason}")


def _open_attempt(status: RunStatus) -> int | None:
    """Number of the attempt of this very job whose end is not on record; None: there is nobody to hear and nothing to
    save. Raises Failed where that cannot be told: what is at work must not be ended without a save."""
    job = status.job
    if job is None:
        return None
    ledger = read_lines(LEDGER, status.run.attempts_ledger, PATIENCE_S)
    doubt = "whether there is something to save cannot be told"
    if isinstance(ledger, Unreadable):
        raise Failed(f"{status.name}: {ledger}; {doubt}")
    if ledger.damaged and ledger.damaged[-1].line >= len(ledger.records) + len(ledger.damaged):
        raise Failed(f"{status.name}: the last line of {status.run.attempts_ledger} cannot be read; {doubt}")
    last = ledger.records[-1] if ledger.records else None
    return last.attempt if isinstance(last, AttemptStart) and last.job_id == job.job_id else None


def _attempt_to_warn(status: RunStatus) -> int | None:
    """The same where nothing is to be saved; where it cannot be told, the newest attempt there is."""
    try:
        return _open_attempt(status)
    except Failed:
        return status.attempt or None


def _request(status: RunStatus, number: int) -> Drain | None:
    """What an attempt has been asked already. Raises Failed where that cannot be told."""
    try:
        return read_or_raise(Drain, status.run.attempt(number).drain)
    except UnreadableRecord as error:
        raise Failed(f"{status.name}: {error}; what it was asked before cannot be told") from error


def _ask_to_leave(status: RunStatus, number: int, cause: str, limit_s: float | None) -> None:
    """Write why, or write it instead of an earlier cause, whose deadline is still that of the job.

    Args:
        number: of the attempt.
        limit_s: seconds from now to the deadline; None: the job's own.
    """
    attempt, at = status.run.attempt(number), time.time()
    before = if_readable(read(Drain, attempt.drain, PATIENCE_S))
    deadline = (before.deadline if before else None) if limit_s is None else at + limit_s
    by = f"{os.environ.get('USER', 'somebody')}, mrl {os.getpid()}"
    try:
        write(attempt.drain, Drain(cause, by, at, deadline, before.end if before else None))
    except OSError as error:
        raise Failed(f"{status.name}: {attempt.drain}: {error.strerror}") from error


def _signal(job_id: str) -> str:
    """The batch host reminds the ranks every few seconds, so a signal that is lost here only costs time."""
    try:
        orders.signal_steps(job_id, "USR1")
    except SlurmRefused as error:
        return f" (its steps could not be signalled from here: {error})"
    return ""


def _tell(order: Callable[[str], None], job_id: str) -> None:
    try:
        order(job_id)
    except SlurmRefused as error:
        raise Failed(f"job {job_id}: {error}") from error


def _save_limit_s(status: RunStatus) -> float:
    try:
        save = resolved_values(status.run).get("save")
    except BadInput:
        save = None
    limit = save.get("timeout_s") if isinstance(save, dict) else None
    return float(limit if isinstance(limit, int | float) else SAVE_LIMIT_S) + DRAIN_MARGIN_S
