"""States of jobs, from squeue and sacct; correct with and without an accounting database.

squeue lists a job until MinJobAge (300 s by default) after its end, sacct for ever if there is a slurmdbd. So a job
that squeue does not list is looked up in sacct, and is gone when neither lists it. Where Slurm does not answer a job is
"unknown", never "gone": its run may still be active."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from launcher.host.record.identity import is_job_of
from launcher.host.slurm.call import SlurmRefused, SlurmSilent, run, unclear
from launcher.host.slurm.formats import ENDED, parse_config, time_of
from launcher.host.slurm.queries import show_job
from megatron_rl.contract.run_records import Owner
from megatron_rl.contract.text import whole_number

Kind = Literal["pending", "running", "ended", "gone", "unknown"]

KINDS: dict[str, Kind] = {
    **dict.fromkeys(("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"), "pending"),
    "EXPEDITING": "pending",  # 25.11 and later: requeued with --requeue=expedite
    **dict.fromkeys(("RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED"), "running"),
    **dict.fromkeys(("SIGNALING", "STAGE_OUT", "RESIZING"), "running"),
    **dict.fromkeys(ENDED, "ended"),
}
"""Slurm's state -> its meaning for the run. A COMPLETING job still has processes, or is about to be requeued."""

AT_ONCE = 5000  # jobs in one query

ENDED_ITSELF = ("COMPLETED", "FAILED")

ABSENT = ("N/A", "(null)", "None")

SQUEUE_FIELDS = (
    *("JobID", "State", "Reason", "RestartCnt", "exit_code", "SubmitTime", "EligibleTime", "StartTime", "EndTime"),
    *("TimeLimit", "Dependency", "NodeList", "Name", "Comment", "BatchFlag"),
)
SEPARATOR = "\x1f"
"""End of each field: job names and reasons may hold any printable character. Fixed widths do not work: squeue prints
some fields (NodeList) beyond their width and, from 23.02 on, nothing at all for an exit code that is not set."""

SQUEUE_COMMAND = (
    *("squeue", "--noheader", "--all", "--states=all"),
    "--Format=" + ",".join(f"{name}:0{SEPARATOR}" for name in SQUEUE_FIELDS),  # 0: as wide as the value
)

SACCT_FIELDS = ("JobID", "State", "ExitCode", "Submit", "Start", "End", "NodeList", "JobName")
SACCT_COMMAND = ("sacct", "-X", "-P", "-D", "--noheader", "--format=" + ",".join(SACCT_FIELDS))


@dataclass(frozen=True, slots=True)
class JobState:
    """State of one job. Times are unix seconds."""

    job_id: str
    word: str  # Slurm's state: PENDING, RUNNING, ...; empty: unknown
    kind: Kind
    reason: str = ""  # Slurm's reason for a job that waits or has failed; for `unknown`, why Slurm did not answer
    name: str = ""
    comment: str = ""
    restarts: int = 0
    nodes: str = ""
    dependency: str = ""
    submitted_at: float | None = None
    eligible_at: float | None = None  # time before which it does not start: the back-off of a requeue
    started_at: float | None = None  # expected start, for a pending job that the scheduler has planned
    ended_at: float | None = None  # time limit, for a running job that has one
    exit_code: int | None = None
    """Exit code of a batch script that ended by itself; negative: the signal that killed it."""
    batch: bool = True  # whether it has a batch script; an salloc has none

    @property
    def owns(self) -> bool:
        return self.kind in ("pending", "running", "unknown")


def read_jobs(job_ids: Sequence[str]) -> dict[str, JobState]:
    """State of each job, from one query to squeue, and one to sacct for jobs that squeue does not list."""
    asked = dict.fromkeys(job_ids)
    # One damaged id would have squeue reject the query about all of them, and then they would seem to be gone.
    found = {
        one: JobState(one, "", "unknown", reason=f"job.json has {one!r}, which is not the id of a job")
        for one in asked
        if whole_number(one) is None
    }
    ids = [one for one in asked if one not in found]
    try:
        for some in batched(ids):
            found |= _ask_squeue(some)
        for some in batched([one for one in ids if one not in found]):
            found |= _ask_sacct(some)
    except SlurmRefused as error:
        return found | {one: JobState(one, "", "unknown", reason=str(error)) for one in ids}
    return {one: found.get(one, JobState(one, "", "gone")) for one in asked}


def batched(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    """Split a list of job ids into parts that fit on a command line: one argument has at most 128 KiB."""
    return (ids[begin : begin + AT_ONCE] for begin in range(0, len(ids), AT_ONCE))


def read_owners(owners: Sequence[Owner]) -> list[JobState]:
    """State of the job in each job.json. A job of another Slurm cluster than the one that answers here is unknown. A
    job that reuses its id does not count."""
    this_cluster = cluster_name() if any(owner.slurm_cluster for owner in owners) else None
    ours = [owner.job_id for owner in owners if owner.slurm_cluster in (None, this_cluster)]
    found = read_jobs(ours)
    return [_job_of(owner, this_cluster, found) for owner in owners]


def _job_of(owner: Owner, this_cluster: str | None, found: Mapping[str, JobState]) -> JobState:
    """State of an owner's job. `this_cluster`: name of the cluster that answers; None: unknown."""
    job_id, theirs = owner.job_id, owner.slurm_cluster
    if theirs is not None and theirs != this_cluster:
        asked = f"this is {this_cluster}" if this_cluster else "Slurm does not answer here"
        return JobState(job_id, "", "unknown", reason=f"it is a job of {theirs}, and {asked}")
    job = found[job_id]
    known = job.word and job.kind != "unknown"
    if known and not is_job_of(owner, job.comment, job.name, job.submitted_at, job.restarts):
        job = JobState(job_id, "", "gone", reason=f"another job has its id now ({job.name})")
    if job.kind == "gone" and theirs is None:
        why = "its cluster is not recorded; remove job.json once it has ended"
        return replace(job, kind="unknown", reason=why)
    return job


def cluster_name() -> str | None:
    try:
        return parse_config(run(["scontrol", "show", "config"]).out).get("ClusterName")
    except SlurmRefused:
        return None


def _ask_squeue(ids: Sequence[str]) -> dict[str, JobState]:
    command = [*SQUEUE_COMMAND, f"--jobs={','.join(ids)}"]
    answer = run(command)
    if answer.code == 0:
        try:
            found = {job.job_id: job for job in parse_squeue(answer.out)}
        except ValueError:
            raise unclear(command, answer.out) from None
        if not all(job_id.isdecimal() for job_id in found):
            raise unclear(command, answer.out)
        # squeue prints nothing and succeeds where none of several jobs exists any more, but also where it could not
        # reach the controller and gave up quietly. Taking the second for the first would call a live run "gone", and
        # the next mrl-submit would start a second job in its directory. So an empty answer counts only if the
        # controller, asked for one of the jobs by scontrol, says that it does not know it.
        if not found and _is_known(ids[0]):
            raise unclear(command, answer.out)
        return found
    if "Invalid job id" in answer.err:  # the answer for a single unknown job
        return {}
    raise SlurmSilent(_last_line(answer.err) or f"squeue failed with {answer.code}")


def _is_known(job_id: str) -> bool:
    """Whether the controller knows a job. Raises SlurmSilent where it does not answer."""
    try:
        show_job(job_id)
    except SlurmSilent:
        raise
    except SlurmRefused as error:
        if "Invalid job id" in str(error):
            return False
        raise SlurmSilent(str(error)) from error
    return True


def _ask_sacct(ids: Sequence[str]) -> dict[str, JobState]:
    """Ended jobs of accounting. A job that it lists as alive, but the controller does not know, is gone."""
    try:
        answer = run([*SACCT_COMMAND, f"--jobs={','.join(ids)}"])
        jobs = parse_sacct(answer.out) if answer.code == 0 else []
    except (SlurmRefused, ValueError):
        return {}
    return {job.job_id: job for job in jobs if job.kind == "ended"}


def parse_squeue(text: str) -> list[JobState]:
    """Parse `squeue --Format` with SQUEUE_FIELDS. Raises ValueError."""
    *records, rest = text.split(f"{SEPARATOR}\n")
    if rest.strip():
        raise ValueError(rest)
    return [_from_squeue(record) for record in records]


def _from_squeue(record: str) -> JobState:
    values = (value.strip() for value in record.split(SEPARATOR))
    field = dict(zip(SQUEUE_FIELDS, values, strict=True))
    field.update({name: "" for name, value in field.items() if value in ABSENT and name != "Name"})
    word = field["State"]
    kind = KINDS.get(word, "unknown")
    return JobState(
        job_id=field["JobID"],
        word=word,
        kind=kind,
        reason=field["Reason"],
        name=field["Name"],
        comment=field["Comment"],
        restarts=int(field["RestartCnt"] or 0),
        nodes=field["NodeList"],
        dependency=field["Dependency"],
        submitted_at=time_of(field["SubmitTime"]),
        eligible_at=time_of(field["EligibleTime"]),
        started_at=time_of(field["StartTime"]),
        # squeue shows the end of a job without a limit as a year from its start.
        ended_at=None if kind != "ended" and field["TimeLimit"] == "UNLIMITED" else time_of(field["EndTime"]),
        exit_code=_exit_code(word, field["exit_code"]),
        batch=field["BatchFlag"] != "0",
    )


def parse_sacct(text: str) -> list[JobState]:
    """Parse `sacct -XPD` with SACCT_FIELDS: the newest start of each job; earlier ones count as restarts. Raises
    ValueError."""
    newest: dict[str, JobState] = {}
    for line in filter(None, text.splitlines()):
        job_id, state, code, submit, start, end, nodes, name = line.split("|", len(SACCT_FIELDS) - 1)
        word = state.split()[0] if state else ""  # "CANCELLED by 1000"
        job = JobState(
            job_id=job_id,
            word=word,
            kind=KINDS.get(word, "unknown"),
            name=name,
            nodes="" if nodes == "None assigned" else nodes,
            submitted_at=time_of(submit),
            started_at=time_of(start),
            ended_at=time_of(end),
            exit_code=_exit_code(word, code),
        )
        before = newest.get(job_id)
        newest[job_id] = replace(job, restarts=before.restarts + 1) if before else job
    return list(newest.values())


def _exit_code(word: str, text: str) -> int | None:
    """Exit code of a script that ended by itself; None where it cannot be parsed. `text`: `CODE:SIGNAL`; from squeue
    before 23.02, the status of waitpid(2)."""
    found = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", text)
    if word not in ENDED_ITSELF or found is None:
        return None
    if found[2] is None:
        status = int(found[1])
        left, signum = status >> 8, status & 0x7F
    else:
        left, signum = int(found[1]), int(found[2])
    return -signum if signum else left


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
