"""The state of a run: its own record and Slurm's word for its job, brought together."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from launcher.backends.slurm.jobs import JobState, read_owners
from launcher.backends.slurm.reasons import wait_of
from launcher.errors import BadInput
from launcher.host.judge.policy import STARTS_AGAIN, SUCCESSOR
from launcher.host.judge.sentence import describe_end
from launcher.host.judge.verdict import describe_exit
from launcher.host.process.lock import owner_of
from launcher.host.record.identity import copied_from
from launcher.host.slurm.formats import CLOCK_S
from launcher.recipe.located_yaml import read_mapping, read_text
from megatron_rl.contract.attempt_records import LEDGER, AttemptEnd, AttemptStart, Drain, LedgerLine, Requeued
from megatron_rl.contract.codes import DRAINED, LOST, STOPPED
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import ABSENT, Absent, Unreadable, if_readable, read, read_lines
from megatron_rl.contract.run_records import Owner, RunIdentity

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
stop. stopped: saved and left. failed: crashed or wrongly configured. lost: ended without a record. unknown: Slurm
cannot be asked. unreadable: what the run itself has on record cannot be read. copy: of the directory of
another run, to which the job on record there belongs."""

UNSURE = ("unknown", "unreadable")
"""States in which the run may be going on, for all we know."""

ALIVE = ("queued", "requeued", "running", "saving", *UNSURE)

_CLUSTER = re.compile(r"^cluster: (?!null$)([A-Za-z][A-Za-z0-9._-]*)$", re.MULTILINE)
_STEPS = re.compile(r"^training:\n(?:  .*\n)*?  steps: (\d{1,12})$", re.MULTILINE)


class Copy(NamedTuple):
    """A directory is a copy of that of another run."""

    original: str

    def __str__(self) -> str:
        return f"a copy of {self.original}, which is another run; mrl resume starts it as a run of its own"


@dataclass(frozen=True, slots=True)
class RunStatus:
    """How a run is."""

    run: RunDir
    cluster: str
    """Name of its profile; empty where its files do not say."""
    state: State
    reason: str
    """Why, in plain words; empty where the state says it all."""
    waits_for: str
    """What has to happen before it goes on; empty for a run that does not wait."""
    job: JobState | None
    """None for a local run."""
    attempt: int
    """Number of the newest one; 0 before the first."""
    steps: int
    """That the run is to make; 0 where its recipe cannot be read."""

    @property
    def name(self) -> str:
        """Name of its directory."""
        return str(self.run.root.absolute().name)

    @property
    def alive(self) -> bool:
        """Whether it may go on without anybody's doing, for all we know."""
        return self.state in ALIVE


def read_statuses(runs: Sequence[RunDir]) -> list[RunStatus]:
    """The status of each of these runs; Slurm is asked once for all of them."""
    owners = [recorded_owner(run) for run in runs]
    jobs = iter(read_owners([owner for owner in owners if isinstance(owner, Owner)]))
    return [_status(run, owner, jobs) for run, owner in zip(runs, owners, strict=True)]


def recorded_owner(run: RunDir) -> Owner | Copy | Absent | Unreadable:
    """The Slurm job that owns the run, or was the last to; ABSENT for a local run."""
    identity = read(RunIdentity, run.identity)
    if isinstance(identity, Unreadable):
        return identity
    if identity is not ABSENT:
        try:
            original = copied_from(run, identity)
        except OSError as error:
            return Unreadable(str(error.filename or run.root), str(error.strerror))
        if original is not None:
            return Copy(original)
    return read(Owner, run.job)


def read_job(run: RunDir) -> JobState | None:
    """What Slurm says of the run's job; None for a run without one. Raises BadInput where it cannot be told which."""
    owner = _owner_or_refusal(run)
    return read_owners([owner])[0] if owner is not None else None


def _status(run: RunDir, owner: Owner | Copy | Absent | Unreadable, jobs: Iterator[JobState]) -> RunStatus:
    if isinstance(owner, Unreadable):
        return RunStatus(run, "", "unreadable", str(owner), "", None, 0, 0)
    status = read_status(run, next(jobs) if isinstance(owner, Owner) else None)
    if isinstance(owner, Copy) and status.state not in ("finished", "unreadable"):
        return replace(status, state="copy", reason=str(owner), waits_for="")
    return status


def read_status(run: RunDir, job: JobState | None) -> RunStatus:
    """The status of a run whose job has been asked about.

    Args:
        job: what Slurm says of the job in RunDir.job; None for a run without one.
    """
    problem, cluster, steps, attempt = "", "", 0, 0
    try:
        cluster, steps = _cluster_and_steps(run)
    except BadInput as error:
        problem = "\n".join(error.problems)
    try:
        attempt = run.last_attempt()
        state, reason, waits_for = _state(run, job)
    except OSError as error:
        state, reason, waits_for = "unreadable", f"{error.filename or run.root}: {error.strerror or error}", ""
    return RunStatus(
        run=run,
        cluster=cluster,
        state=state,
        reason=reason or problem,
        waits_for=waits_for,
        job=job,
        attempt=attempt,
        steps=steps,
    )


def _cluster_and_steps(run: RunDir) -> tuple[str, int]:
    """Of the recipe. As mrl writes resolved.yaml they can be read without parsing all of it, which would take half a
    minute for ten thousand runs. Raises BadInput as `resolved_values`."""
    text = read_text(run.resolved)
    cluster, steps = _CLUSTER.search(text), _STEPS.search(text)
    if cluster and steps:
        return cluster[1], int(steps[1])
    values = resolved_values(run)
    training = values.get("training")
    count = training.get("steps") if isinstance(training, dict) else 0
    return str(values.get("cluster") or "local"), count if isinstance(count, int) else 0


def job_id_of(run: RunDir) -> str | None:
    """The Slurm job that owns the run, or was the last to; None for a local run. Raises BadInput where job.json cannot
    be read, and for a copy of a run."""
    owner = _owner_or_refusal(run)
    return None if owner is None else owner.job_id


def _owner_or_refusal(run: RunDir) -> Owner | None:
    owner = recorded_owner(run)
    if isinstance(owner, Copy):
        raise BadInput(f"{run.root}: is {owner}")
    if isinstance(owner, Unreadable):
        raise BadInput(str(owner))
    return None if owner is ABSENT else owner


def resolved_values(run: RunDir) -> dict[str, Any]:
    """The sections of resolved.yaml, without the checks, which its writer has made and which are slow for many runs.
    Raises BadInput where there are none."""
    values: dict[str, Any] = read_mapping(str(run.resolved), read_text(run.resolved), "the sections of a recipe").value
    return values


def last_line(run: RunDir) -> LedgerLine | None:
    """The newest line of the ledger; None where there is none or it cannot be read, so that nothing says what became of
    the newest attempt."""
    found = read_lines(LEDGER, run.attempts_ledger)
    return None if isinstance(found, Unreadable) or not found.records else found.records[-1]


def has_left(job: JobState, last: LedgerLine | None) -> bool:
    """Whether the run has ended within a job that goes on, or may do so for all we know: an allocation that somebody
    works in, or a job that is about to end. One whose ledger says that it starts again is about to do that instead.

    Args:
        last: the newest line of the run's ledger.
    """
    if job.kind not in ("running", "unknown"):
        return False
    return isinstance(last, AttemptEnd) and _ended_in(job, last) and not (job.batch and last.then in STARTS_AGAIN)


def _state(run: RunDir, job: JobState | None) -> tuple[State, str, str]:
    """(state, reason, what it waits for). Raises OSError."""
    ledger = read_lines(LEDGER, run.attempts_ledger)
    if run.done.exists():
        return "finished", "", ""
    if isinstance(ledger, Unreadable):
        return "unreadable", str(ledger), ""
    last = ledger.records[-1] if ledger.records else None
    if job is None:
        return _of_local_run(run, last)
    if has_left(job, last):
        return _ended(run, last, "failed", "its script was killed")
    if job.kind == "unknown":
        return "unknown", f"Slurm cannot be asked about job {job.job_id}: {job.reason}", ""
    if job.kind == "pending":
        return _pending(job, last)
    if job.kind == "running":
        return _of_running_job(run, job, last)
    if last and last.job_id != job.job_id:
        last = None  # of an earlier job: this one left no record
    if job.word == "CANCELLED" and not isinstance(last, AttemptEnd):
        return "cancelled", _end_of_job(job), ""
    return _ended(run, last, "lost" if job.kind == "gone" else "failed", _end_of_job(job))


def _of_local_run(run: RunDir, last: LedgerLine | None) -> tuple[State, str, str]:
    try:
        held = owner_of(run.lock) is not None
    except OSError as error:  # no locks there, or a run of somebody else
        if isinstance(last, AttemptStart):
            return "unreadable", f"whether its supervisor runs cannot be told: {run.lock}: {error.strerror}", ""
        held = False
    if held:
        return _running(run)
    return _ended(run, last, "lost", "its supervisor was killed") if last else ("new", "it has never started", "")


def _pending(job: JobState, last: LedgerLine | None) -> tuple[State, str, str]:
    wait = wait_of(job)
    end = last if isinstance(last, AttemptEnd) else None
    state: State = "requeued" if job.restarts or (end and end.then == SUCCESSOR) else "queued"
    if wait.stuck:
        return state, f"it will not start: {wait.what}", ""
    return state, _sentence(end) if end else "", wait.what


def _of_running_job(run: RunDir, job: JobState, last: LedgerLine | None) -> tuple[State, str, str]:
    if job.word == "CONFIGURING":
        return "running", "", "its nodes to boot"
    if isinstance(last, AttemptEnd) and _ended_in(job, last) and job.batch and last.then in STARTS_AGAIN:
        return "requeued", _sentence(last), "its earlier attempt to be cleaned up"  # on its way back into the queue
    begun = isinstance(last, AttemptStart) and last.job_id == job.job_id
    # Else the newest attempt is an earlier one's, and so is its request to leave.
    return _running(run) if begun else ("running", "", "its attempt to begin")


def _ended_in(job: JobState, last: AttemptEnd) -> bool:
    """Whether the ledger's newest line is the end of an attempt of this very start of the job."""
    return last.job_id == job.job_id and (job.started_at is None or last.at >= job.started_at - CLOCK_S)


def _running(run: RunDir) -> tuple[State, str, str]:
    drain = read(Drain, run.attempt(run.last_attempt()).drain)
    if drain is ABSENT:
        return "running", "", ""
    return "saving", "" if isinstance(drain, Unreadable) else drain.cause, "the ranks to save and leave"


def _ended(run: RunDir, last: LedgerLine | None, state: State, reason: str) -> tuple[State, str, str]:
    """By the ledger's last line; by `state` and `reason`, which is how its job ended, where that has no end."""
    if not isinstance(last, AttemptEnd):
        return state, reason, ""
    back = last.then in STARTS_AGAIN  # and yet the job has ended
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
    """How a job ended, in a sentence."""
    if job.kind == "gone":
        return f"job {job.job_id} is gone, and {job.reason or 'Slurm does not remember how it ended'}"
    if job.word == "CANCELLED":
        return f"job {job.job_id} was cancelled"
    if job.exit_code is not None and job.exit_code < 0:
        return f"the script of job {job.job_id} {describe_exit(job.exit_code)}, and Slurm starts no such job again"
    code = f" with exit code {job.exit_code}" if job.exit_code else ""
    why = f" ({job.reason})" if job.reason else ""
    return f"job {job.job_id} ended as {job.word}{code}{why}; see the batch log"
