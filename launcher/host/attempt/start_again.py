"""Start a job again, as the ledger says: requeue it, or submit its successor, without the nodes that failed the run.

The ledger's line of the end states the intention; `Attempt.requeued` confirms it, or holds the error. What is not
confirmed when the run starts again was cut short, and is done then.

A node that failed the run is used again after a day: by then it is repaired, or fails again. It is excluded only while
Slurm has enough other nodes, since a job that excludes too many waits for ever (seen on 22.05, as BadConstraints).
"""

from __future__ import annotations

import os
import sys
import time
from typing import Callable, TypeVar

from launcher.host.attempt.job_context import FAULTS_VARIABLE, JobContext
from launcher.host.judge import policy
from launcher.host.judge.policy import BY_SLURM, BY_US, HELD, OVER, SUCCESSOR
from launcher.host.record.identity import comment_of, note_submission
from launcher.host.record.ledger import ends_in, read_ledger_or_complain
from launcher.host.slurm import orders, queries
from launcher.host.slurm.call import SlurmRefused, SlurmSilent, SlurmUnclear, patiently
from megatron_rl.contract.attempt_records import AttemptEnd, LedgerLine, Requeued
from megatron_rl.contract.codes import PREEMPTED
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.records import ABSENT, if_readable, read, write
from megatron_rl.contract.run_records import Owner, RunIdentity

OUTAGE_S = 1800.0  # seconds to wait for a controller that restarts; meanwhile nobody else gets the nodes either
LIMIT_S = 25.0  # seconds for orders after the job's requeue: this process is killed after KillWait, 30 by default
AGAIN_S = 0.5  # seconds between tries
SOON_S = 5.0  # seconds of a pause that are too short to go back into the queue
EXCLUDED_FOR_S = 86400.0  # seconds for which a node that failed the run is avoided

T = TypeVar("T")


def bring_back(
    context: JobContext, attempt: Attempt, end: AttemptEnd, returning: bool = False, or_successor: bool = True
) -> bool:
    """Start the job again if the end of its attempt says so, and record the result. Never raises for Slurm or the disk:
    a process that has closed an attempt must end either way.

    Returns whether the job, or its successor, is in Slurm's queue.

    Args:
        returning: whether Slurm has requeued the job already; then it can still be kept from nodes.
        or_successor: as for `start_again`.
    """
    if end.then in (HELD, OVER):
        _stay_away(context)
    if end.then not in (BY_US, SUCCESSOR) and not (end.then == BY_SLURM and returning):
        return returning
    requeued = start_again(context, end, or_successor=or_successor)
    try:
        write(attempt.requeued, requeued)
    except OSError as error:
        print(error, file=sys.stderr)
    return requeued.queued


def _stay_away(context: JobContext) -> None:
    """Keep Slurm from starting a job again that has ever been preempted.

    Slurm 24.05 and later mark a job at the beginning of its grace time, and requeue it when its script ends. `scontrol
    requeue` does not remove the mark (seen on 24.11), so an earlier preemption may have left it.
    """
    ends = ends_in(read_ledger_or_complain(context.run))
    if any(end.cause == PREEMPTED and end.job_id == context.job_id for end in ends):
        try:
            orders.forbid_requeue(context.job_id)
        except SlurmRefused as error:  # the next start will find nothing to do
            print(error, file=sys.stderr)


def start_again(
    context: JobContext,
    end: AttemptEnd,
    script: str | None = None,
    environment: dict[str, str] | None = None,
    or_successor: bool = True,
) -> Requeued:
    """Start the job again, or a successor. Returns the record of it: the nodes that the job avoids, and what Slurm
    refused.

    Args:
        script: the successor's, if not the run's own.
        environment: further variables of the successor.
        or_successor: whether a job that turns out not to be requeueable gets a successor. Slurm may not have answered
            when it was asked about that.
    """
    avoid: list[str] | None = None
    problems: list[str | None] = []
    queued, postponed = end.then == BY_SLURM, end.not_before is None
    try:
        if end.then == SUCCESSOR:
            if script is None:
                script = str(context.run.script)
                environment = {FAULTS_VARIABLE: "0"}
            _submit_successor(context, end, script, environment or {})
            queued = postponed = True
        else:
            # The nodes come first, since this process has only seconds once the job is requeued: Slurm sends SIGTERM,
            # which we ignore, and then SIGKILL.
            try:
                listed, avoid = _nodes_to_avoid(context, end)
            except (SlurmRefused, OSError) as error:  # the job starts again all the same
                problems.append(str(error))
            if end.then == BY_US:
                patiently(lambda: orders.requeue(context.job_id), OUTAGE_S)
                queued = True
            limit = time.monotonic() + LIMIT_S
            start, hosts = end.not_before, avoid
            if start:
                refusal = _until(limit, lambda: orders.postpone(context.job_id, float(start or 0.0)))
                postponed = refusal is None
                problems.append(refusal)
            if hosts is not None and set(hosts) != set(listed):
                problems.append(_until(limit, lambda: orders.exclude(context.job_id, hosts or [])))
    except orders.NotRequeueable as error:
        if or_successor:
            print(f"a successor continues the run: {error}", file=sys.stderr)
            return start_again(context, end._replace(then=SUCCESSOR), script, environment)
        problems.append(str(error))
    except (SlurmRefused, OSError) as error:
        problems.append(str(error))
    refused = [problem for problem in problems if problem]
    for problem in refused:
        print(f"the job could not be sent back as intended: {problem}", file=sys.stderr)
    return Requeued(time.time(), avoid, "; ".join(refused) or None, queued, postponed)


def _nodes_to_avoid(context: JobContext, end: AttemptEnd) -> tuple[list[str], list[str]]:
    """Return the nodes that the job avoids now, and those that it should avoid from now on. Raises SlurmRefused."""
    if not end.excluded and not excluded_since(read_ledger_or_complain(context.run)):
        return [], []
    patience = LIMIT_S if end.then == BY_US else 0.0  # short, since the job may be about to be killed
    listed = patiently(lambda: queries.avoided_nodes(queries.show_job(context.job_id)), patience)
    return listed, patiently(lambda: nodes_to_avoid(context.run, end, listed, time.time()), patience)


def _until(limit: float, act: Callable[[], None]) -> str | None:
    """Repeat an order until Slurm accepts it: a job that is being requeued is not pending at once. Returns the last
    refusal where `limit` (monotonic seconds) passes first."""
    while True:
        try:
            act()
            return None
        except SlurmRefused as error:
            if time.monotonic() + AGAIN_S >= limit:
                return str(error)
        time.sleep(AGAIN_S)


def _submit_successor(context: JobContext, end: AttemptEnd, script: str, environment: dict[str, str]) -> None:
    """Submit a successor, with as much of the present job's record as Slurm shows. Raises SlurmRefused, OSError."""
    run = context.run
    give_up = time.monotonic() + OUTAGE_S
    nothing: dict[str, str] = {}
    nobody: list[str] = []
    job = _answer_or(nothing, lambda: queries.show_job(context.job_id), give_up)
    name = job.get("JobName") or context.environ.get("SLURM_JOB_NAME", run.root.name)
    avoid = _answer_or(nobody, lambda: nodes_to_avoid(run, end, queries.avoided_nodes(job), time.time()), give_up)
    before = set(_answer_or(nobody, lambda: queries.waiting_for(context.job_id, name), give_up))  # a sweep's next jobs
    identity = if_readable(read(RunIdentity, run.identity))
    comment = job.get("Comment", "")
    if identity is not None and identity.id not in comment:
        comment = comment_of(identity.id)
    tried: list[SlurmSilent] = []

    def submit() -> str:
        fresh = sorted(set(queries.waiting_for(context.job_id, name)) - before) if tried else []
        if fresh:  # Slurm had accepted it, and its answer was lost
            return fresh[0]
        if tried and isinstance(tried[-1], SlurmUnclear):
            raise tried[-1]  # sbatch succeeded: a second call might submit a second job
        try:
            return orders.submit_successor(context.job_id, script, name, comment, end.not_before, avoid, environment)
        except SlurmSilent as error:
            tried.append(error)
            raise

    job_id = patiently(submit, OUTAGE_S)
    print(f"job {job_id} continues the run")
    write_owner(context, job_id, name, identity.id if identity else "", succeeds=context.job_id)


def _answer_or(default: T, ask_slurm: Callable[[], T], give_up: float) -> T:
    """Return Slurm's answer; the default, with the error in the log, where it does not answer until `give_up`
    (monotonic seconds) or the disk fails."""
    try:
        return patiently(ask_slurm, give_up - time.monotonic())
    except (SlurmRefused, OSError) as error:
        print(error, file=sys.stderr)
        return default


def write_owner(context: JobContext, job_id: str, name: str, run_id: str, succeeds: str | None = None) -> None:
    """Record a job as the owner of the run, and in the user's index. Raises OSError."""
    by, slurm_cluster = os.environ.get("USER", ""), context.slurm_cluster
    write(context.run.job, Owner(job_id, context.cluster, time.time(), by, slurm_cluster, succeeds, run_id, name))
    note_submission(context.run, context.cluster, job_id)


def is_too_early(context: JobContext, attempt: Attempt, end: AttemptEnd) -> bool:
    """Whether this job started before its back-off was over because Slurm never got the order to postpone it: the
    process that gives it was killed before it confirmed it, or Slurm refused it. False where Slurm got the order and
    the user then started the job sooner.

    Slurm's own record cannot distinguish these: StartTime of a running job is when it started, and EligibleTime that of
    the last order. A job that Slurm requeued (BY_SLURM) has waited in the queue already. A record that cannot be read
    may confirm the order.
    """
    if (
        end.then != BY_US
        or end.job_id != context.job_id
        or not end.not_before
        or end.not_before <= time.time() + SOON_S
    ):
        return False
    done = read(Requeued, attempt.requeued)
    return done is ABSENT or (isinstance(done, Requeued) and done.queued and not done.postponed)


def nodes_to_avoid(run: RunDir, end: AttemptEnd, listed: list[str], now: float) -> list[str]:
    """All nodes that the job should avoid from now on; it avoids those `listed` already. Raises SlurmRefused."""
    history = read_ledger_or_complain(run)
    fresh = just_excluded(history, end)
    since = dict(excluded_since(history), **dict.fromkeys(fresh, now))
    theirs = [host for host in listed if host not in since]
    # The user took a node of ours off the list where it is not in there any more.
    ours = [host for host in since if host in fresh or (host in listed and now < since[host] + EXCLUDED_FOR_S)]
    if ours:
        known = queries.node_states(theirs + ours)  # Slurm refuses a list with a node that no longer exists
        theirs, ours, fresh = ([host for host in hosts if host in known] for hosts in (theirs, ours, fresh))
    for avoided in (ours, fresh, []):
        if not avoided or queries.could_start(str(run.script), theirs + avoided):
            break
    dropped = sorted(set(ours) - set(avoided))
    if dropped:
        print(f"not avoided, because without them too few nodes are left: {', '.join(dropped)}")
    return sorted(set(theirs + avoided))


def just_excluded(history: list[LedgerLine], end: AttemptEnd) -> list[str]:
    """Nodes that failed the run in the present allocation, up to `end`: Slurm does not know them yet."""
    hosts = list(end.excluded)
    for earlier in reversed([line for line in ends_in(history) if line.attempt < end.attempt]):
        if earlier.then != policy.STAYS:
            break
        hosts += earlier.excluded
    return sorted(set(hosts))


def excluded_since(history: list[LedgerLine]) -> dict[str, float]:
    """Node -> unix time at which the run last excluded it, since the run was last held for the user."""
    return {host: end.at for end in policy.since_held(history) for host in end.excluded}
