"""Control of a run from outside: which run is meant; cancel it, with or without a save, or requeue it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import BadInput, Failed
from launcher.host.slurm import orders
from launcher.host.slurm.call import SlurmRefused
from launcher.runs.find import NEAR, find, is_run, newest_first, pasteable_command
from launcher.runs.state import UNSURE, RunStatus, read_statuses, resolved_values
from megatron_rl.contract.attempt_records import LEDGER, AttemptStart, Drain
from megatron_rl.contract.codes import CANCELLED, REQUEUE
from megatron_rl.contract.paths import RunDir
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
from megatron_rl.contract.shapes import LARGEST_INT

DRAIN_MARGIN_S = 60  # seconds for the unfinished step, beside the save itself
SAVE_LIMIT_S = 600.0  # seconds of a save, where the recipe of the run has no limit


@dataclass(frozen=True, slots=True)
class Target:
    status: RunStatus
    doubt: str


def target_of(name: str | None) -> Target:
    """Run of a directory, a name, a prefix of one, or the id of its present job; None: the only one queued or running.
    Raises BadInput where there is none, or more than one, or the directory is a copy of a run's."""
    if name is None:
        runs = [RunDir(one.run_dir) for one in newest_first()]
        return Target(_only([one for one in read_statuses(runs) if one.alive]), "no RUN was given")
    (status,) = read_statuses([find(name)])
    if status.state == "copy":
        raise BadInput(f"{status.run.root}: is {status.reason}")
    if is_run(name):
        return Target(status, "")
    if name.isdigit() and name != status.name:
        job_id = status.job.job_id if status.job else None
        if job_id != name and status.alive:
            now = f"has job {job_id} now" if job_id else "is a local run now"
            raise BadInput(f"job {name} was an earlier job of {status.name}, which {now}; name the run, or that job")
        return Target(status, "")
    return Target(status, "" if Path(status.run.root).name == name else f"{name!r} is only the start of its name")


def _only(alive: list[RunStatus]) -> RunStatus:
    if not alive:
        raise BadInput("no run of this account is queued or running; name one (`mrl ls` lists them)")
    if len(alive) > 1:
        shown = "".join(f"\n  {one.name} ({one.state}) in {one.run.root.absolute().parent}" for one in alive[:NEAR])
        more = f"\n  and {len(alive) - NEAR} more" if len(alive) > NEAR else ""
        raise BadInput(f"RUN is missing, and {len(alive)} runs may be meant; name one:{shown}{more}")
    return alive[0]


def cancel(status: RunStatus, drain: bool) -> str:
    """End a run that is alive; with `drain` it saves first, if it has begun. Returns what was done. Raises Failed, also
    where it is unknown whether the run is alive."""
    _refuse_unsure(status)
    job = status.job
    if job is None:
        limit = _save_limit_s(status) if drain else 0.0
        _ask_to_leave(status, status.attempt, CANCELLED, limit)
        return f"saving, then leaving, within {limit:.0f} s" if drain else "killed"
    # The request goes into the attempt's drain file before Slurm gets any order. Without it the host side would see a
    # signal that nothing explains, after which a run starts again: `mrl cancel` would restart it. A drain does not call
    # scancel at all, since Slurm would kill the job after KillWait; it ends by itself once its ranks have saved.
    begun = _open_attempt(status) if drain else _attempt_to_warn(status)
    if drain and begun:
        _ask_to_leave(status, begun, CANCELLED, None)
        if job.kind == "pending":  # it was killed and has come back; or Slurm's answer is older than its start
            _order(orders.cancel_waiting, job.job_id)
            return f"job {job.job_id} is cancelled; if it runs again already, it saves and leaves"
        return f"job {job.job_id} was asked to save and to leave; it will not be requeued{_signal(job.job_id)}"
    if not job.batch:
        if not begun:
            raise Failed(f"{status.name}: job {job.job_id} is an interactive allocation, which is not cancelled")
        _ask_to_leave(status, begun, CANCELLED, 0.0)
        return f"its ranks are ended; the allocation, job {job.job_id}, stays"
    if begun:  # a drain for another cause would bring the job back
        _ask_to_leave(status, begun, CANCELLED, None)
    _order(orders.cancel, job.job_id)
    return f"job {job.job_id} is cancelled" + (", it had nothing to save" if drain else "")


def requeue(status: RunStatus, now: bool) -> str:
    """Release the nodes, after a save unless `now`, and wait in the queue again. Returns what was done. Raises Failed,
    also where it is unknown whether the run is alive."""
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
        return f"job {job.job_id} is requeued; it resumes from its newest checkpoint"
    _ask_to_leave(status, begun, REQUEUE, None)
    return f"job {job.job_id} was asked to save; then it is requeued{_signal(job.job_id)}"


def _refuse_unsure(status: RunStatus) -> None:
    if status.state in UNSURE:
        raise Failed(f"{status.name}: {status.reason}")


def _open_attempt(status: RunStatus) -> int | None:
    """Number of the job's attempt that has not ended; None: there is nothing to save. Raises Failed where that is
    unknown: a working attempt must not be ended without a save."""
    job = status.job
    if job is None:
        return None
    ledger = read_lines(LEDGER, status.run.attempts_ledger, PATIENCE_S)
    doubt = "so it is unknown whether there is something to save"
    if isinstance(ledger, Unreadable):
        raise Failed(f"{status.name}: {ledger}, {doubt}")
    if ledger.damaged and ledger.damaged[-1].line >= len(ledger.records) + len(ledger.damaged):
        raise Failed(f"{status.name}: the last line of {status.run.attempts_ledger} cannot be read, {doubt}")
    last = ledger.records[-1] if ledger.records else None
    return last.attempt if isinstance(last, AttemptStart) and last.job_id == job.job_id else None


def _attempt_to_warn(status: RunStatus) -> int | None:
    try:
        return _open_attempt(status)
    except Failed:
        return status.attempt or None


def _request(status: RunStatus, number: int) -> Drain | None:
    """Earlier request to an attempt, if there is one. Raises Failed where it cannot be read."""
    try:
        return read_or_raise(Drain, status.run.attempt(number).drain)
    except UnreadableRecord as error:
        raise Failed(f"{status.name}: {error}, so an earlier request to it is unknown") from error


def _ask_to_leave(status: RunStatus, number: int, cause: str, limit_s: float | None) -> None:
    """Write a request to leave within `limit_s` seconds; None: by the job's own deadline. It replaces the cause of an
    earlier request and keeps its deadline."""
    attempt, at = status.run.attempt(number), time.time()
    before = if_readable(read(Drain, attempt.drain, PATIENCE_S))
    deadline = (before.deadline if before else None) if limit_s is None else at + limit_s
    by = f"{os.environ.get('USER', 'somebody')}, mrl {os.getpid()}"
    try:
        write(attempt.drain, Drain(cause, by, at, deadline, before.end if before else None))
    except OSError as error:
        raise Failed(f"{status.name}: {attempt.drain}: {error.strerror}") from error


def _signal(job_id: str) -> str:
    """Signal the steps of a job. Returns a remark where that fails, which only costs time: the batch host signals the
    ranks every few seconds."""
    try:
        orders.signal_steps(job_id, "USR1")
    except SlurmRefused as error:
        return f" (its steps could not be signalled from here: {error})"
    return ""


def _order(order: Callable[[str], None], job_id: str) -> None:
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
    if not isinstance(limit, int | float) or not 0 <= limit <= LARGEST_INT:  # somebody edited it
        limit = SAVE_LIMIT_S
    return float(limit) + DRAIN_MARGIN_S
