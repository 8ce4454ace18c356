"""Ownership of a run: one job at a time, one host process at a time. The owner concludes what earlier starts left."""

from __future__ import annotations

import stat
import time
from contextlib import suppress

from launcher.host.attempt.conclude import conclude_lost
from launcher.host.attempt.job_context import JobContext, JobRefused
from launcher.host.attempt.start_again import bring_back, is_too_early, write_owner
from launcher.host.judge.policy import HELD, OVER
from launcher.host.judge.sentence import describe_end
from launcher.host.process.lock import IsLocked, Lock
from launcher.host.record.identity import identify, is_job_of
from launcher.host.record.ledger import newest_line, read_ledger, start_of, starts_in
from launcher.host.slurm import queries
from launcher.host.slurm.call import SlurmRefused, patiently
from launcher.host.slurm.formats import ENDED, time_of
from megatron_rl.contract.attempt_records import AttemptEnd, LedgerLine
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import read_or_raise, write
from megatron_rl.contract.run_records import Owner
from megatron_rl.contract.text import whole_number

LEFTOVERS_S = 120.0  # seconds for which an earlier start may still hold the lock: NFSv4 keeps a lost node's for 90 s
LEFTOVERS_AGAIN_S = 900.0  # seconds until a job checks again whether they have ended
COMPLETING_S = 300.0  # seconds to wait for an earlier job that completes: an epilog, or a process that does not die
LOOK_S = 5.0  # seconds between queries to Slurm
ENTER_S = 5.0  # seconds in which a job that holds the lock enters itself as the owner


class NothingToDo(Exception):
    """The run is finished or stopped, or belongs to another job; the text says which."""


class StillHeld(Exception):
    """Processes of an earlier start of this job, or of the job that it succeeds, still hold the lock. They end at some
    time; until then they may write."""


def own(context: JobContext) -> Lock:
    """Take the run for this job. Returns its lock, which all child processes inherit.

    Raises:
        NothingToDo: the job may end, and nothing is wrong.
        JobRefused: the user must look at the run first.
        StillHeld: the job must come back later.
        OSError: the file system fails; it may work later or on another host.
        SlurmRefused: Slurm did not answer.
    """
    run = context.run
    if not run.resolved.exists():
        raise OSError(f"mrl-submit has made {run.root}, and this host does not have it: not the same file system?")
    _hide_log(run)
    lock = _lock(context, read_or_raise(Owner, run.job), read_ledger(run))
    try:
        _take_ownership(context)
    except BaseException:
        lock.release()
        raise
    if not lock.works:
        print(f"{run.root}: this file system has no locks, so only job.json identifies the owner")
    return lock


def _hide_log(run: RunDir) -> None:
    with suppress(OSError):  # in an salloc there is none
        allowed = stat.S_IMODE(run.root.stat().st_mode)
        run.batch_log.chmod(stat.S_IMODE(run.batch_log.stat().st_mode) & allowed)


def _take_ownership(context: JobContext) -> None:
    """Make this job, which holds the lock, the owner of the run. Raises as `own`."""
    run = context.run
    if run.done.exists():
        raise NothingToDo(f"{run.root}: finished already, nothing to do")
    identity = identify(run)
    owner = read_or_raise(Owner, run.job)
    _wait_for_earlier_jobs(context, owner)
    mine = owner is not None and owner.job_id == context.job_id
    if owner is not None and not mine:
        if context.succeeds is not None and owner.job_id != context.succeeds:
            raise NothingToDo(f"{run.root}: now belongs to job {owner.job_id}, nothing to do")
        if not _has_ended(owner, context):
            raise JobRefused(
                f"{run.root} belongs to job {owner.job_id}, which may still run; once it has ended, remove job.json"
            )
    _conclude_earlier_starts(context)
    if not mine:  # the user's sbatch of the run's own script; mrl-submit would have entered the job
        write_owner(context, context.job_id, context.environ.get("SLURM_JOB_NAME", ""), identity.id)
    elif owner is not None and not owner.slurm_cluster and context.slurm_cluster:  # mrl-submit did not know it
        write(run.job, owner._replace(slurm_cluster=context.slurm_cluster))


def _conclude_earlier_starts(context: JobContext) -> None:
    run = context.run
    conclude_lost(run, time.time(), context)
    if run.done.exists():
        raise NothingToDo(f"{run.root}: had finished, nothing to do")
    lines = read_ledger(run)
    end = lines[-1] if lines else None
    if not isinstance(end, AttemptEnd) or end.job_id != context.job_id:
        return  # the user submitted a new job to continue
    start = start_of(lines, end.attempt)
    if start is None or context.restarts <= start.restart:
        return  # the same allocation once more
    if end.then == HELD:
        raise JobRefused(f"{run.root}: {describe_end(end, time.time())}; mrl resume continues it")
    if end.then == OVER:
        raise NothingToDo(f"{run.root}: was stopped on request; mrl resume continues it")
    attempt = run.attempt(end.attempt)
    # A job that cannot go back into the queue continues here, without its pause.
    if is_too_early(context, attempt, end) and bring_back(context, attempt, end, or_successor=False):
        raise NothingToDo(f"{run.root}: its pause is not over, the job waits in the queue")


def _lock(context: JobContext, owner: Owner | None, history: list[LedgerLine]) -> Lock:
    # Processes that this job, or the one before it, left when it was requeued may take a moment to end. Such a job
    # waits; any other one refuses at once, since a user who submits a run twice by mistake should learn it in a second,
    # and not after two minutes in which its nodes stand idle.
    mine = owner is not None and owner.job_id == context.job_id
    last_job = history[-1].job_id if history and history[-1].job_id is not None else context.job_id
    expected = context.succeeds is not None or (mine and (context.restarts > 0 or last_job != context.job_id))
    try:
        return Lock(context.run.job_lock, LEFTOVERS_S if expected and not _has_begun(context, history) else 0.0)
    except IsLocked:
        job_id, history = _job_that_begins(context.run), read_ledger(context.run)
        if expected and job_id in (context.job_id, context.succeeds) and not _has_begun(context, history):
            # They run on where only Slurm has lost the node, and a file server may keep its locks until it boots.
            host = next((f" on {start.host}" for start in reversed(starts_in(history))), "")
            raise StillHeld(f"processes of an earlier start{host} still hold {context.run.job_lock}") from None
        raise JobRefused(f"{context.run.root}: belongs to job {job_id}, whose script is running") from None


def _has_begun(context: JobContext, history: list[LedgerLine]) -> bool:
    """Whether this start of the job has begun an attempt: if it asks for the lock, its script was called twice."""
    newest = [(start.job_id, start.restart) for start in starts_in(history)][-1:]
    return newest == [(context.job_id, context.restarts)]


def _job_that_begins(run: RunDir) -> str:
    """Id of the job whose host side holds the lock; it may be about to enter itself as the owner."""
    give_up = time.monotonic() + ENTER_S
    owner = read_or_raise(Owner, run.job)
    while owner is None and time.monotonic() < give_up:
        time.sleep(0.1)
        owner = read_or_raise(Owner, run.job)
    return owner.job_id if owner is not None else "another one"


def _wait_for_earlier_jobs(context: JobContext, owner: Owner | None) -> None:
    """Wait while Slurm still ends the jobs before this one: a rank of theirs may still write into the run directory."""
    last = newest_line(context.run)
    before = {line.job_id for line in (owner, last) if line is not None and line.job_id} - {context.job_id}
    give_up = time.monotonic() + COMPLETING_S
    for job_id in sorted(str(job_id) for job_id in before):
        if queries.is_completing(job_id):
            print(f"waiting until job {job_id} has left its nodes")
        while queries.is_completing(job_id) and time.monotonic() < give_up:
            time.sleep(LOOK_S)


def _has_ended(owner: Owner, context: JobContext) -> bool:
    """Whether the job of job.json is known to have ended. This Slurm knows nothing about a job of another cluster, or
    of an unrecorded one: its own job of that id, or its lack of one, proves nothing."""
    if owner.slurm_cluster and context.slurm_cluster and owner.slurm_cluster != context.slurm_cluster:
        return False
    try:
        job = patiently(lambda: queries.show_job(owner.job_id))
    except SlurmRefused as error:
        return bool(owner.slurm_cluster) and "Invalid job id" in str(error)
    name, submitted_at, restarts = job.get("JobName", ""), time_of(job.get("SubmitTime")), job.get("Restarts", "")
    if not is_job_of(owner, job.get("Comment", ""), name, submitted_at, whole_number(restarts) or 0):
        return bool(owner.slurm_cluster)
    return job.get("JobState") in ENDED
