"""The Slurm job around an attempt: why it is asked to leave, and the facts that decide whether it starts again."""

from __future__ import annotations

import sys
import time

from launcher.host.attempt.interfaces import AttemptJob
from launcher.host.attempt.job_context import JobContext
from launcher.host.attempt.start_again import bring_back
from launcher.host.judge import causes
from launcher.host.judge.nodes import suffice, to_exclude
from launcher.host.judge.policy import Facts
from launcher.host.record.ledger import newest_known_checkpoint, read_ledger, start_of
from launcher.host.record.log_tails import ended_by_slurm
from launcher.host.slurm import queries
from launcher.host.slurm.call import SlurmRefused, patiently
from launcher.host.slurm.formats import is_dead
from megatron_rl.contract.attempt_records import AttemptEnd, Drain, NodeAssignment
from megatron_rl.contract.codes import REQUEUE, SIGNALLED
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.plan_records import PlanRecord
from megatron_rl.contract.records import if_readable, read, write


class SlurmJob(AttemptJob):
    """Slurm job of this process.

    Args:
        notice: seconds of the job's --signal before its time limit.
        backoff: seconds before a crashed run starts again.
        outlives_nodes: whether the job survives nodes that die (--no-kill).
    """

    takes_nodes = True

    def __init__(self, context: JobContext, notice: float, backoff: float, outlives_nodes: bool) -> None:
        self.context, self.job_id = context, context.job_id
        self.unfit: dict[str, str] = {}
        self._notice, self._backoff, self._outlives_nodes = notice, backoff, outlives_nodes
        self._job: dict[str, str] = {}

    def request_for(self, signal_name: str, now: float) -> Drain:
        # Slurm is not queried here: a controller that preempts many jobs answers late, and the grace time runs.
        hurry = now if signal_name == "SIGHUP" else None  # from mrl-submit in an allocation: end now
        return Drain(SIGNALLED, causes.TO_BATCH_HOST.format(signal_name), now, deadline=hurry)

    def complete(self, attempt: Attempt, request: Drain) -> Drain:
        cause = self._cause(queries.show_job(self.context.job_id), attempt, request)
        deadline = cause.end
        if deadline is not None and deadline <= time.time():
            deadline += queries.kill_wait()  # a job that Slurm ends at once is killed KillWait seconds later
        return causes.completed(request, cause, deadline)

    def final_request(self, attempt: Attempt, request: Drain | None, drained: bool) -> Drain | None:
        """Query Slurm once more: a preemption may have become a cancellation, and steps may have ended on a signal that
        this process did not get."""
        self._job = show_job_or_complain(self.context.job_id)
        if request is None and not drained and not causes.is_ending(self._job):
            return None
        cause = self._cause(self._job, attempt, request)
        if request is None:
            final = Drain(cause.cause, causes.TO_STEPS, time.time(), deadline=cause.end)
        elif causes.is_truer(cause.cause, request.cause):
            final = request._replace(cause=cause.cause)
        else:
            return request
        try:
            write(attempt.drain, final)
        except OSError as error:
            print(error, file=sys.stderr)
        return final

    def facts(self, attempt: Attempt, request: Drain | None) -> Facts:
        context, job = self.context, self._job
        dead = dead_nodes(context.hosts)
        plan = if_readable(read(PlanRecord, context.run.plan))
        left = set(context.hosts) - set(self.unfit) - set(dead)
        return Facts(
            checkpoint=newest_known_checkpoint(context.run),
            can_return=causes.has_script(job),
            requeueable=causes.is_requeueable(job),
            returning=causes.is_returning(job, context.restarts),
            bad=to_exclude(self.unfit, unfit_before(context.run, attempt)),
            dead=dead,
            suffice=self._outlives_nodes and plan is not None and suffice(plan, left),
            backoff_s=self._backoff,
        )

    def bring_back(self, attempt: Attempt, end: AttemptEnd, returning: bool) -> None:
        bring_back(self.context, attempt, end, returning)

    def _cause(self, job: dict[str, str], attempt: Attempt, request: Drain | None) -> causes.Cause:
        end = request.end if request is not None else None
        cancels = queries.preemption_cancels(job)
        cause = causes.cause_of(job, time.time(), self._notice, self.context.restarts, end, cancels)
        if cause.cause not in (REQUEUE, SIGNALLED):
            return cause
        try:
            start = start_of(read_ledger(self.context.run, patience=0.0), attempt.number)
        except OSError:
            start = None
        recorded = ended_by_slurm(self.context.run, start) if start is not None else None
        return cause._replace(cause=recorded or cause.cause)


def unfit_before(run: RunDir, attempt: Attempt) -> dict[str, str]:
    assignment = if_readable(read(NodeAssignment, run.attempt(attempt.number - 1).nodes))
    return assignment.bad if assignment is not None else {}


def show_job_or_complain(job_id: str) -> dict[str, str]:
    """Slurm's record of a job, empty where it does not answer."""
    try:
        return patiently(lambda: queries.show_job(job_id))
    except SlurmRefused as error:
        print(error, file=sys.stderr)
        return {}


def dead_nodes(hosts: list[str]) -> list[str]:
    """Nodes among `hosts` that are dead; empty where Slurm does not answer."""
    try:
        states = queries.node_states(hosts) if hosts else {}
    except SlurmRefused as error:
        print(error, file=sys.stderr)
        return []
    return sorted(host for host, state in states.items() if is_dead(state))
