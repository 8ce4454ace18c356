"""The state of a run, from its own record and Slurm's state of its job."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from launcher.backends.slurm.jobs import JobState, read_owners
from launcher.backends.slurm.reasons import wait_of
from launcher.errors import BadInput
from launcher.host.judge.policy import STARTS_AGAIN, SUCCESSOR
from launcher.host.judge.sentence import describe_end
from launcher.host.judge.verdict import describe_exit
from launcher.host.process.lock import owner_of
from launcher.host.slurm.formats import CLOCK_S
from launcher.recipe.located_yaml import read_mapping, read_text
from launcher.runs.find import at_once
from launcher.runs.owner import Copy, recorded_owner
from megatron_rl.contract.attempt_records import LEDGER, AttemptEnd, AttemptStart, Drain, LedgerLine, Requeued
from megatron_rl.contract.codes import DRAINED, LOST, STOPPED
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import ABSENT, Absent, Unreadable, if_readable, read, read_lines
from megatron_rl.contract.run_records import Owner

State = Literal[
    "new",
    "queued",
    "requeued",
    "running",
    "saving",
    "finished",
    "stopped",
    "failed",
    "cancelled",
    "lost",
    "unknown",
    "unreadable",
    "copy",
]
"""new: prepared and never started. queued, requeued: waits in the queue, for the first time or again. saving: asked to
stop. stopped: saved and left. failed: crashed or wrongly configured. lost: ended without a record. unknown: Slurm does
not answer. unreadable: the run's own record cannot be read. copy: copy of the directory of another run, to which the
recorded job belongs."""

Line = TypeVar("Line", AttemptStart, AttemptEnd)

UNSURE = ("unknown", "unreadable")

ALIVE = ("queued", "requeued", "running", "saving", *UNSURE)

NO_LOG = -53  # exit code of a script whose output slurmd could not open (ExitCode=0:53, seen on 22.05)

_CLUSTER = re.compile(r"^cluster: (?!null$)([A-Za-z][A-Za-z0-9._-]*)$", re.MULTILINE)
_STEPS = re.compile(r"^training:\n(?:  .*\n)*?  steps: (\d{1,12})$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class RunStatus:
    run: RunDir
    cluster: str
    state: State
    reason: str
    waits_for: str
    """Condition that it waits for; empty for a run that does not wait."""
    job: JobState | None
    attempt: int
    steps: int
    """Number of training steps in its recipe; 0 where that cannot be read."""
    unread: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return str(self.run.root.absolute().name)

    @property
    def alive(self) -> bool:
        return self.state in ALIVE


def read_statuses(runs: Sequence[RunDir]) -> list[RunStatus]:
    """Status of each run, with one query to Slurm for all of them."""
    owners = at_once(recorded_owner, runs)
    jobs = iter(read_owners([owner for owner in owners if isinstance(owner, Owner)]))
    of_runs = [next(jobs) if isinstance(owner, Owner) else None for owner in owners]
    return at_once(_status, runs, owners, of_runs)


def _status(run: RunDir, owner: Owner | Copy | Absent | Unreadable, job: JobState | None) -> RunStatus:
    if isinstance(owner, Unreadable):
        return RunStatus(run, "", "unreadable", str(owner), "", None, 0, 0, (str(owner),))
    status = read_status(run, job)
    if isinstance(owner, Copy) and status.state not in ("finished", "unreadable"):
        return replace(status, state="copy", reason=str(owner), waits_for="")
    return status


def read_status(run: RunDir, job: JobState | None) -> RunStatus:
    """Status of a run, and of its job in RunDir.job; None for a run without one."""
    unread: list[str] = []
    cluster, steps, attempt = "", 0, 0
    try:
        cluster, steps = _cluster_and_steps(run)
    except BadInput as error:
        unread += error.problems
    problem = "\n".join(unread)
    try:
        attempt = run.last_attempt()
        state, reason, waits_for = _state(run, job, unread)
    except OSError as error:
        state, reason, waits_for = "unreadable", f"{error.filename or run.root}: {error.strerror or error}", ""
        unread.append(reason)
    return RunStatus(run, cluster, state, reason or problem, waits_for, job, attempt, steps, tuple(unread))


def _cluster_and_steps(run: RunDir) -> tuple[str, int]:
    """Return the cluster and the number of steps in the recipe. They are found by pattern, since parsing resolved.yaml
    would take half a minute for ten thousand runs. Raises BadInput as `resolved_values`."""
    text = read_text(run.resolved)
    cluster, steps = _CLUSTER.search(text), _STEPS.search(text)
    if cluster and steps:
        return cluster[1], int(steps[1])
    values = resolved_values(run)
    training = values.get("training")
    count = training.get("steps") if isinstance(training, dict) else 0
    return str(values.get("cluster") or "local"), count if isinstance(count, int) else 0


def resolved_values(run: RunDir) -> dict[str, Any]:
    """Sections of resolved.yaml, not validated again, which would be slow for many runs. Raises BadInput."""
    values: dict[str, Any] = read_mapping(str(run.resolved), read_text(run.resolved), "the sections of a recipe").value
    return values


def result_file(run: RunDir) -> Path | None:
    """Result file of a job that evaluates; None for a run that trains, or whose request cannot be read."""
    try:
        out = json.loads(read_text(run.evaluation_request))["out"]
        return Path(out) if out else run.evaluation
    except (BadInput, ValueError, LookupError, TypeError, RecursionError):
        return None


def last_line(run: RunDir) -> LedgerLine | None:
    found = read_lines(LEDGER, run.attempts_ledger)
    return None if isinstance(found, Unreadable) or not found.records else found.records[-1]


def line_of(run: RunDir, attempt: int, kind: type[Line]) -> Line | None:
    """Return the line of this kind that the ledger has of an attempt."""
    found = read_lines(LEDGER, run.attempts_ledger)
    lines = [] if isinstance(found, Unreadable) else found.records
    return next((one for one in lines if isinstance(one, kind) and one.attempt == attempt), None)


def has_left(job: JobState, last: LedgerLine | None) -> bool:
    """Whether the run has ended although its job may still be active: an interactive allocation, or a job that is about
    to end. False where the ledger says that the job starts again."""
    if job.kind not in ("running", "unknown"):
        return False
    return isinstance(last, AttemptEnd) and _ended_in(job, last) and not (job.batch and last.then in STARTS_AGAIN)


def _state(run: RunDir, job: JobState | None, unread: list[str]) -> tuple[State, str, str]:
    """Return (state, reason, condition that it waits for); `unread` gets messages about files. Raises OSError."""
    ledger = read_lines(LEDGER, run.attempts_ledger)
    if run.done.exists():
        end = ledger.records[-1] if not isinstance(ledger, Unreadable) and ledger.records else None
        return "finished", end.why if isinstance(end, AttemptEnd) else "", ""
    if isinstance(ledger, Unreadable):
        unread.append(str(ledger))
        return "unreadable", str(ledger), ""
    if ledger.damaged:
        unread.append(f"{run.attempts_ledger}: {len(ledger.damaged)} of its lines cannot be read")
    last = ledger.records[-1] if ledger.records else None
    if job is None:
        return _of_local_run(run, last, unread)
    if has_left(job, last):
        return _ended(run, last, "failed", "its script was killed")
    if job.kind == "unknown":
        return "unknown", f"Slurm does not answer about job {job.job_id}: {job.reason}", ""
    if job.kind == "pending":
        return _pending(job, last)
    if job.kind == "running":
        return _of_running_job(run, job, last, unread)
    if last and last.job_id != job.job_id:
        last = None  # of an earlier job: this one left no record
    if job.word == "CANCELLED" and not isinstance(last, AttemptEnd):
        return "cancelled", _end_of_job(job), ""
    return _ended(run, last, "lost" if job.kind == "gone" else "failed", _end_of_job(job))


def _of_local_run(run: RunDir, last: LedgerLine | None, unread: list[str]) -> tuple[State, str, str]:
    try:
        held = owner_of(run.lock) is not None
    except OSError as error:  # no locks there, or a run of another user
        if isinstance(last, AttemptStart):
            why = f"it is unknown whether its supervisor runs: {run.lock}: {error.strerror}"
            unread.append(why)
            return "unreadable", why, ""
        held = False
    if held:
        return _running(run, unread)
    return _ended(run, last, "lost", "its supervisor was killed") if last else ("new", "it has never started", "")


def _pending(job: JobState, last: LedgerLine | None) -> tuple[State, str, str]:
    wait = wait_of(job)
    end = last if isinstance(last, AttemptEnd) else None
    state: State = "requeued" if job.restarts or (end and end.then == SUCCESSOR) else "queued"
    if wait.stuck:
        return state, f"it will not start: {wait.what}", ""
    return state, _sentence(end) if end else "", wait.what


def _of_running_job(run: RunDir, job: JobState, last: LedgerLine | None, unread: list[str]) -> tuple[State, str, str]:
    if job.word == "CONFIGURING":
        return "running", "", "its nodes to boot"
    if isinstance(last, AttemptEnd) and _ended_in(job, last) and job.batch and last.then in STARTS_AGAIN:
        return "requeued", _sentence(last), "its earlier attempt to be cleaned up"  # on its way back into the queue
    begun = isinstance(last, AttemptStart) and last.job_id == job.job_id
    # Otherwise the newest attempt, and its request to leave, are of an earlier job.
    return _running(run, unread) if begun else ("running", "", "its attempt to begin")


def _ended_in(job: JobState, last: AttemptEnd) -> bool:
    return last.job_id == job.job_id and (job.started_at is None or last.at >= job.started_at - CLOCK_S)


def _running(run: RunDir, unread: list[str]) -> tuple[State, str, str]:
    drain = read(Drain, run.attempt(run.last_attempt()).drain)
    if drain is ABSENT:
        return "running", "", ""
    if isinstance(drain, Unreadable):
        unread.append(str(drain))
    return "saving", "" if isinstance(drain, Unreadable) else drain.cause, "the ranks to save and leave"


def _ended(run: RunDir, last: LedgerLine | None, state: State, reason: str) -> tuple[State, str, str]:
    """State by the ledger's last line; where that does not end an attempt, the given state and reason of its job."""
    if not isinstance(last, AttemptEnd):
        return state, reason, ""
    back = last.then in STARTS_AGAIN  # but the job has ended
    ending = _sentence(last._replace(then=None, why="") if back else last)
    if back:
        done = if_readable(read(Requeued, run.attempt(last.attempt).requeued))
        ending += f"; it did not come back: {(done and done.problem) or reason}"
    if last.outcome in (STOPPED, DRAINED):
        return "stopped", ending, ""
    return "lost" if last.outcome == LOST else "failed", ending, ""


def _sentence(end: AttemptEnd) -> str:
    return describe_end(end, time.time())


def _end_of_job(job: JobState) -> str:
    if job.kind == "gone":
        return f"job {job.job_id} is gone, and {job.reason or 'Slurm does not remember how it ended'}"
    if job.word == "CANCELLED":
        return f"job {job.job_id} was cancelled"
    if job.exit_code == NO_LOG:
        return f"job {job.job_id} could not start: its node could not write the batch log (its place, quota, disk)"
    if job.exit_code is not None and job.exit_code < 0:
        return f"the script of job {job.job_id} {describe_exit(job.exit_code)}, and Slurm starts no such job again"
    code = f" with exit code {job.exit_code}" if job.exit_code else ""
    why = f" ({job.reason})" if job.reason else ""
    return f"job {job.job_id} ended as {job.word}{code}{why}; see the batch log"
