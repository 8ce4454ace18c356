"""What a run is told from outside: save and leave, leave at once, come back elsewhere."""

from __future__ import annotations

import os
import time

from launcher.backends.slurm.call import SlurmSilent
from launcher.backends.slurm.call import call
from launcher.errors import BadInput
from launcher.host.judge import causes
from launcher.host.slurm import client
from launcher.runs.state import Standing
from launcher.runs.state import resolved_values
from megatron_rl.run_dir import read_json
from megatron_rl.run_dir import read_json_lines
from megatron_rl.run_dir import write_json

DRAIN_MARGIN_S = 60  # beside the save itself: the step that is under way


class Failed(BadInput):
    """The order could not be given. A run that Slurm could not be told to cancel may still save and leave."""

    exit_code = 1


def cancel(standing: Standing, drain: bool) -> str:
    """End a run that is alive; says what was done.

    Args:
        drain: let it save first, if it has begun.
    """
    job = standing.job
    if job is None:
        limit = _save_limit_s(standing) if drain else 0.0
        _ask_to_leave(standing, causes.CANCELLED, limit)
        return f"saving, then leaving, within {limit:.0f} s" if drain else "killed"
    begun = _has_open_attempt(standing)
    if drain and begun:
        _ask_to_leave(standing, causes.CANCELLED, None)
        return f"job {job.job_id} was asked to save and to leave; it will not be requeued{_signal(job.job_id)}"
    if not job.batch:
        if not begun:
            raise Failed(f"{standing.name}: job {job.job_id} is an allocation that somebody works in; it stays")
        _ask_to_leave(standing, causes.CANCELLED, 0.0)
        return f"its ranks are ended; the allocation, job {job.job_id}, stays"
    if begun:  # or a drain that is under way for another cause would bring the job back
        _ask_to_leave(standing, causes.CANCELLED, None)
    _scancel(job.job_id)
    return f"job {job.job_id} is cancelled" + (", it had nothing to save" if drain else "")


def requeue(standing: Standing, now: bool) -> str:
    """Give the nodes back and wait in the queue again; says what was done.

    Args:
        now: without saving first.
    """
    job = standing.job
    if job is None:
        raise Failed(f"{standing.name}: is a local run, which no queue holds; stop it and mrl resume {standing.name}")
    if not job.batch:
        raise Failed(f"{standing.name}: runs in an allocation, job {job.job_id}, which no queue holds")
    if job.kind == "pending":
        raise Failed(f"{standing.name}: job {job.job_id} is in the queue already")
    if job.kind != "running":
        raise Failed(f"{standing.name}: is {standing.state}; mrl resume {standing.name} submits it again")
    request = read_json(standing.run.attempt(standing.attempt).drain)
    if request and request["cause"] == causes.CANCELLED and not now:
        raise Failed(f"{standing.name}: is being cancelled; mrl resume {standing.name} once it has ended")
    if now or not _has_open_attempt(standing):
        try:
            client.requeue(job.job_id)
        except client.SlurmRefused as error:
            raise Failed(f"{standing.name}: {error}") from error
        return f"job {job.job_id} is requeued; it goes on from its newest checkpoint"
    _ask_to_leave(standing, causes.REQUEUE, None)
    return f"job {job.job_id} was asked to save; then it is requeued{_signal(job.job_id)}"


def _has_open_attempt(standing: Standing) -> bool:
    """Whether ranks of this very job may be at work: else there is nobody to hear and nothing to save."""
    lines = read_json_lines(standing.run.attempts_ledger)
    job = standing.job
    return bool(job and job.kind == "running" and lines) and (
        lines[-1]["event"] == "start" and lines[-1].get("job_id") == (job and job.job_id)
    )


def _ask_to_leave(standing: Standing, cause: str, limit_s: float | None) -> None:
    """Says why, or says so instead of an earlier cause, whose deadline is still that of the job."""
    attempt = standing.run.attempt(standing.attempt)
    at = time.time()
    by = f"{os.environ.get('USER', 'somebody')}, mrl {os.getpid()}"
    before = read_json(attempt.drain) or {}
    deadline = before.get("deadline") if limit_s is None else at + limit_s
    write_json(attempt.drain, {"cause": cause, "by": by, "at": at, "deadline": deadline})


def _signal(job_id: str) -> str:
    """The batch host reminds the ranks every few seconds, so a signal that is lost here only costs time."""
    try:
        client.signal_steps(job_id, "USR1")
    except client.SlurmRefused as error:
        return f" (its steps could not be signalled from here: {error})"
    return ""


def _scancel(job_id: str) -> None:
    try:
        answer = call(["scancel", job_id])
    except SlurmSilent as error:
        raise Failed(f"job {job_id}: {error}") from error
    if answer.code != 0:
        raise Failed(f"job {job_id}: {answer.err.strip() or 'scancel failed'}")


def _save_limit_s(standing: Standing) -> float:
    save = resolved_values(standing.run).get("save") or {}
    return float(save.get("timeout_s", 600)) + DRAIN_MARGIN_S
