"""How a run stands: its own record and Slurm's word for its job, brought together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from launcher.backends.slurm.reasons import wait_of
from launcher.backends.slurm.jobs import JobState
from launcher.backends.slurm.jobs import read_recorded
from launcher.host.judge.causes import CLOCK
from launcher.host.process.lock import owner_of
from launcher.host.judge.policy import STARTS_AGAIN
from launcher.host.judge.policy import STOPPED
from launcher.host.judge.policy import SUCCESSOR
from launcher.host.judge.verdict import DRAINED
from launcher.host.judge.verdict import LOST
from launcher.host.judge.verdict import in_words as exit_in_words
from launcher.host.judge.sentence import in_words
from megatron_rl.contract.paths import RunDir
from megatron_rl.run_dir import read_json
from megatron_rl.run_dir import read_json_lines

State = Literal[
    "new", "queued", "requeued", "running", "saving", "finished", "stopped", "failed", "cancelled", "lost", "unknown"
]
"""new: prepared and never started. queued, requeued: waits in the queue, for the first time or again. saving: asked to
stop. stopped: saved and left. failed: crashed or wrongly configured. lost: ended without a record. unknown: Slurm
cannot be asked."""

ALIVE = ("queued", "requeued", "running", "saving", "unknown")


@dataclass(frozen=True, slots=True)
class Standing:
    run: RunDir
    cluster: str
    state: State
    reason: str
    """Why, in plain words; empty where the state says it all."""
    waits_for: str
    """What has to happen before it goes on; empty for a run that does not wait."""
    job: JobState | None
    """None for a local run."""
    attempt: int
    """Of the newest one; 0 before the first."""
    steps: int
    """That the run is to make."""

    @property
    def name(self) -> str:
        return str(self.run.root.absolute().name)

    @property
    def alive(self) -> bool:
        return self.state in ALIVE


def job_id_of(run: RunDir) -> str | None:
    """The Slurm job that owns the run, or was the last to; None for a local run."""
    record = read_json(run.job)
    return str(record["job_id"]) if record else None


def look(run: RunDir, job: JobState | None) -> Standing:
    """
    Args:
        job: what Slurm says of the job in RunDir.job; None for a run without one.
    """
    recipe = resolved_values(run)
    ledger = read_json_lines(run.attempts_ledger)
    state, reason, waits_for = _judge(run, job, ledger[-1] if ledger else None)
    return Standing(
        run=run,
        cluster=str(recipe.get("cluster") or "local"),
        state=state,
        reason=reason,
        waits_for=waits_for,
        job=job,
        attempt=run.last_attempt(),
        steps=int(recipe["training"]["steps"]),
    )


def resolved_values(run: RunDir) -> dict[str, Any]:
    """resolved.yaml without the checks, which its writer has made and which are slow for a list of runs."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return dict(yaml.load(run.resolved.read_text(encoding="utf-8"), loader))


def _judge(run: RunDir, job: JobState | None, last: dict[str, Any] | None) -> tuple[State, str, str]:
    """(state, reason, what it waits for)"""
    if run.done.exists():
        return "finished", "", ""
    if job is None:
        if owner_of(run.lock) is not None:
            return _running(run)
        return _ended(run, last, "lost", "its supervisor was killed") if last else ("new", "it has never started", "")
    if has_left(job, last):
        return _ended(run, last, "failed", "its script was killed")
    if job.kind == "unknown":
        return "unknown", f"Slurm cannot be asked about job {job.job_id}: {job.reason}", ""
    if job.kind == "pending":
        wait = wait_of(job)
        again = last is not None and last["event"] == "end" and last.get("then") == SUCCESSOR
        state: State = "requeued" if job.restarts or again else "queued"
        if wait.stuck:
            return state, f"it will not start: {wait.what}", ""
        return state, in_words(last, time.time()) if last and last["event"] == "end" else "", wait.what
    if job.kind == "running":
        if job.word == "CONFIGURING":
            return "running", "", "its nodes to boot"
        if _is_going_back(job, last):
            return "requeued", in_words(last or {}, time.time()), "its earlier attempt to be cleaned up"
        begun = last is not None and last["event"] == "start" and last.get("job_id") == job.job_id
        # Else the newest attempt is an earlier one's, and so is its request to leave.
        return _running(run) if begun else ("running", "", "its attempt to begin")
    if last and last.get("job_id") != job.job_id:
        last = None  # of an earlier job: this one left no record
    if job.word == "CANCELLED" and (last is None or last["event"] == "start"):
        return "cancelled", _end_in_words(job), ""
    return _ended(run, last, "lost" if job.kind == "gone" else "failed", _end_in_words(job))


def has_left(job: JobState, last: dict[str, Any] | None) -> bool:
    """Whether the run has ended within a job that goes on, or may do so for all we know: an allocation that somebody
    works in, or a job that is about to end. One whose ledger says that it starts again is about to do that instead.

    Args:
        last: the newest line of the run's ledger.
    """
    if last is None or job.kind not in ("running", "unknown") or not _ended_in(job, last):
        return False
    return not (job.batch and last.get("then") in STARTS_AGAIN)


def _is_going_back(job: JobState, last: dict[str, Any] | None) -> bool:
    """Whether a job that Slurm calls running has ended its attempt, and is about to wait in the queue again."""
    return last is not None and _ended_in(job, last) and job.batch and last.get("then") in STARTS_AGAIN


def _ended_in(job: JobState, last: dict[str, Any]) -> bool:
    """Whether the ledger's newest line is the end of an attempt of this very start of the job."""
    if last["event"] != "end" or last.get("job_id") != job.job_id:
        return False
    return job.started_at is None or last["at"] >= job.started_at - CLOCK


def _running(run: RunDir) -> tuple[State, str, str]:
    request = read_json(run.attempt(run.last_attempt()).drain)
    if request is None:
        return "running", "", ""
    return "saving", str(request["cause"]), "the ranks to save and leave"


def _ended(run: RunDir, last: dict[str, Any] | None, state: State, reason: str) -> tuple[State, str, str]:
    """By the ledger's last line; by `state` and `reason`, which is how its job ended, where that has no end."""
    if last is None or last["event"] == "start":
        return state, reason, ""
    back = last.get("then") in STARTS_AGAIN  # and yet the job has ended
    said = in_words({**last, "then": None, "why": None} if back else last, time.time())
    if back:
        done = read_json(run.attempt(last["attempt"]).requeued)
        said += f"; it did not come back: {(done and done['problem']) or reason}"
    outcome = last["outcome"]
    if outcome in (STOPPED, DRAINED):
        return "stopped", said, ""
    return "lost" if outcome == LOST else "failed", said, ""


def _end_in_words(job: JobState) -> str:
    if job.kind == "gone":
        return f"job {job.job_id} is gone, and Slurm does not remember how it ended"
    if job.word == "CANCELLED":
        return f"job {job.job_id} was cancelled"
    if job.exit_code is not None and job.exit_code < 0:
        return f"the script of job {job.job_id} {exit_in_words(job.exit_code)}, and Slurm starts no such job again"
    code = f" with exit code {job.exit_code}" if job.exit_code else ""
    why = f" ({job.reason})" if job.reason else ""
    return f"job {job.job_id} ended as {job.word}{code}{why}; see the batch log"


def look_all(all_runs: Sequence[RunDir]) -> list[Standing]:
    """How each of these runs stands; Slurm is asked once for all of them."""
    records = [read_json(run.job) for run in all_runs]
    jobs = iter(read_recorded([record for record in records if record]))
    return [look(run, next(jobs) if record else None) for run, record in zip(all_runs, records, strict=True)]
