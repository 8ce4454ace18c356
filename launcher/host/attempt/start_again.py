"""Have a job start again, as the ledger says it should: by requeueing it, or by submitting another one in its place.

The ledger's line of the end is the intention. `Attempt.requeued` confirms it, or holds what went wrong. What is not
confirmed when the run starts again was cut short, and is done then.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Callable, TypeVar

from launcher.host.attempt.job_context import FAULTS_VARIABLE, PREPARED_VARIABLE, JobContext
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

OUTAGE_S = 1800.0  # a controller that starts again or is updated; meanwhile nobody else gets the nodes either
LIMIT_S = 25.0  # what a process has left after its own requeue is KillWait, 30 by default
AGAIN_S = 0.5  # between tries
SOON_S = 5.0  # for which nobody is sent back into the queue

T = TypeVar("T")


def bring_back(context: JobContext, attempt: Attempt, end: AttemptEnd, returning: bool = False) -> bool:
    """Start the job again if the end of its attempt says that this is ours to do, and note what came of it. Never
    raises for Slurm or the disk: a process that has closed an attempt has to end either way.

    Args:
        returning: Slurm has requeued the job already, which can be kept from nodes then.

    Returns whether the job is in Slurm's queue again, or its successor.
    """
    if end.then in (HELD, OVER):
        _stay_away(context)
    if end.then not in (BY_US, SUCCESSOR) and not (end.then == BY_SLURM and returning):
        return returning
    requeued = start_again(context, end)
    try:
        write(attempt.requeued, requeued)
    except OSError as error:
        print(error, file=sys.stderr)
    return requeued.queued


def _stay_away(context: JobContext) -> None:
    """Keep Slurm from starting a job once more that has ever been preempted.

    Slurm 24.05 and later marks a job at the beginning of its grace time and requeues it when its script ends with this
    mark. `scontrol requeue` does not remove the mark (seen on 24.11), so it may be that of an earlier preemption.
    """
    ends = ends_in(read_ledger_or_complain(context.run))
    if any(end.cause == PREEMPTED and end.job_id == context.job_id for end in ends):
        try:
            orders.forbid_requeue(context.job_id)
        except SlurmRefused as error:  # the next start finds that there is nothing to do
            print(error, file=sys.stderr)


def start_again(
    context: JobContext, end: AttemptEnd, script: str | None = None, environment: dict[str, str] | None = None
) -> Requeued:
    """Have the job start again; the nodes that it avoids then (None: undecided), and what Slurm refused of all this.

    Args:
        script: that a successor runs; None: the one in the run directory.
        environment: variables that it is to have beside ours.
    """
    avoid: list[str] | None = None
    problems: list[str | None] = []
    queued, postponed = end.then == BY_SLURM, end.not_before is None
    try:
        if end.then == SUCCESSOR:
            if script is None:
                script = str(context.run.script)
                environment = {PREPARED_VARIABLE: str(context.run.root), FAULTS_VARIABLE: "0"}
            _submit_successor(context, end, script, environment or {})
            queued = postponed = True
        else:
            # First, for once the job is requeued this process has seconds: Slurm sends SIGTERM to everything here,
            # which we ignore, and then SIGKILL.
            try:
                listed, avoid = _nodes_to_avoid(context, end)
            except (SlurmRefused, OSError) as error:  # it starts again all the same
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
    except (SlurmRefused, OSError) as error:
        problems.append(str(error))
    refused = [problem for problem in problems if problem]
    for problem in refused:
        print(f"the job could not be sent back as intended: {problem}", file=sys.stderr)
    return Requeued(time.time(), avoid, "; ".join(refused) or None, queued, postponed)


def _nodes_to_avoid(context: JobContext, end: AttemptEnd) -> tuple[list[str], list[str]]:
    """Those that the job avoids as it is, and those that it is to avoid from now on. Raises SlurmRefused."""
    if not end.excluded and not excluded_since(read_ledger_or_complain(context.run)):
        return [], []
    patience = LIMIT_S if end.then == BY_US else 0.0  # not for long: the job may be short of time
    listed = patiently(lambda: queries.avoided_nodes(queries.show_job(context.job_id)), patience)
    return listed, patiently(lambda: nodes_to_avoid(context.run, end, listed, time.time()), patience)


def _until(limit: float, act: Callable[[], None]) -> str | None:
    """The last refusal, if the time was over before it was accepted: a job on its way back is not pending yet."""
    while True:
        try:
            act()
            return None
        except SlurmRefused as error:
            if time.monotonic() + AGAIN_S >= limit:
                return str(error)
        time.sleep(AGAIN_S)


def _submit_successor(context: JobContext, end: AttemptEnd, script: str, environment: dict[str, str]) -> None:
    """Raises SlurmRefused, OSError. What Slurm refuses to tell before keeps no successor from being submitted."""
    run = context.run
    give_up = time.monotonic() + OUTAGE_S
    nothing: dict[str, str] = {}
    nobody: list[str] = []
    job = _answer_or(nothing, lambda: queries.show_job(context.job_id), give_up)
    name = job.get("JobName") or context.environ.get("SLURM_JOB_NAME", run.root.name)
    avoid = _answer_or(nobody, lambda: nodes_to_avoid(run, end, queries.avoided_nodes(job), time.time()), give_up)
    before = set(_answer_or(nobody, lambda: queries.waiting_for(context.job_id, name), give_up))  # those of a sweep
    identity = if_readable(read(RunIdentity, run.identity))
    comment = job.get("Comment", "")
    if identity is not None and identity.id not in comment:
        comment = comment_of(identity.id)
    tried: list[SlurmSilent] = []

    def submit() -> str:
        fresh = sorted(set(queries.waiting_for(context.job_id, name)) - before) if tried else []
        if fresh:  # Slurm had taken it, and its answer was lost
            return fresh[0]
        if tried and isinstance(tried[-1], SlurmUnclear):
            raise tried[-1]  # it did as if it had taken it: a second one would be a second job
        try:
            return orders.submit_successor(context.job_id, script, name, comment, end.not_before, avoid, environment)
        except SlurmSilent as error:
            tried.append(error)
            raise

    job_id = patiently(submit, OUTAGE_S)
    print(f"job {job_id} goes on with the run")
    write_owner(context, job_id, name, identity.id if identity else "", succeeds=context.job_id)


def _answer_or(default: T, ask_slurm: Callable[[], T], give_up: float) -> T:
    """What Slurm answers; the default, with a word in the log, where it does not by a time (monotonic), or the disk
    fails."""
    try:
        return patiently(ask_slurm, give_up - time.monotonic())
    except (SlurmRefused, OSError) as error:
        print(error, file=sys.stderr)
        return default


def write_owner(context: JobContext, job_id: str, name: str, run_id: str, succeeds: str | None = None) -> None:
    """Enter a job as the one that owns the run, and in the user's index. Raises OSError.

    Args:
        name: of the job.
    """
    by, slurm_cluster = os.environ.get("USER", ""), context.slurm_cluster
    write(context.run.job, Owner(job_id, context.cluster, time.time(), by, slurm_cluster, succeeds, run_id, name))
    note_submission(context.run, context.cluster, job_id)


def is_too_early(context: JobContext, attempt: Attempt, end: AttemptEnd) -> bool:
    """Whether this job started before its back-off was over because Slurm was never told of it: the process that should
    have was killed before it could say that it had, or Slurm refused it. Not when Slurm was told, and somebody then
    wanted the job sooner.

    Slurm itself shows too little to tell these apart: of a job that runs, StartTime is when it started, and
    EligibleTime is that of the last wish, whoever had it. A job that Slurm requeued (BY_SLURM) is not sent away again:
    it has waited in the queue since, for as long as Slurm holds what it requeues. A record that cannot be read may be
    one of a pause that Slurm was told of.
    """
    if (
        end.then != BY_US
        or end.job_id != context.job_id
        or not end.not_before
        or end.not_before <= time.time() + SOON_S
    ):
        return False
    told = read(Requeued, attempt.requeued)
    return told is ABSENT or (isinstance(told, Requeued) and told.queued and not told.postponed)


EXCLUDED_FOR_S = 86400.0


def nodes_to_avoid(run: RunDir, end: AttemptEnd, listed: list[str], now: float) -> list[str]:
    """All nodes that the job is to avoid from now on. Raises SlurmRefused.

    Args:
        end: of the attempt that has ended.
        listed: nodes that the job avoids as it is.
    """
    history = read_ledger_or_complain(run)
    fresh = just_excluded(history, end)
    since = dict(excluded_since(history), **dict.fromkeys(fresh, now))
    theirs = [host for host in listed if host not in since]
    # One of ours that is not listed was taken off by somebody.
    ours = [host for host in since if host in fresh or (host in listed and now < since[host] + EXCLUDED_FOR_S)]
    if ours:
        known = queries.node_states(theirs + ours)  # one that the cluster has no more makes Slurm refuse them all
        theirs, ours, fresh = ([host for host in hosts if host in known] for hosts in (theirs, ours, fresh))
    for avoided in (ours, fresh, []):
        if not avoided or queries.could_start(str(run.script), theirs + avoided):
            break
    dropped = sorted(set(ours) - set(avoided))
    if dropped:
        print("not avoided, because without them too few nodes are left: {}".format(", ".join(dropped)))
    return sorted(set(theirs + avoided))


def just_excluded(history: list[LedgerLine], end: AttemptEnd) -> list[str]:
    """Nodes that failed the run since Slurm last chose its nodes: where the next attempt began in the same allocation,
    Slurm was not told of them.

    Args:
        end: of the attempt that has ended.
    """
    hosts = list(end.excluded)
    for earlier in reversed([line for line in ends_in(history) if line.attempt < end.attempt]):
        if earlier.then != policy.STAYS:
            break
        hosts += earlier.excluded
    return sorted(set(hosts))


def excluded_since(history: list[LedgerLine]) -> dict[str, float]:
    """Node -> when the run was last excluded from it, since somebody last had a look at the run."""
    return {host: end.at for end in policy.since_held(history) for host in end.excluded}
