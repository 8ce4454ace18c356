"""The end of an attempt: judge it, decide about the job, record both, and act on it.

The process that saw the end concludes it, or the next start where that process was killed or could not write. Both read
the same files and so reach the same conclusion.
"""

from __future__ import annotations

import socket
import sys
import time
from typing import NamedTuple

from launcher.host.attempt.interfaces import AttemptJob
from launcher.host.attempt.job_context import JobContext
from launcher.host.attempt.slurm_job import dead_nodes, unfit_before
from launcher.host.judge import policy
from launcher.host.judge.causes import OF_ENDED
from launcher.host.judge.nodes import to_exclude
from launcher.host.judge.policy import Decision, Facts, decide
from launcher.host.judge.replica_restarts import without_replicas
from launcher.host.judge.sentence import describe_end
from launcher.host.judge.verdict import Verdict, verdict_of
from launcher.host.record.evidence import Observed, read_drain, read_evidence, read_replicas
from launcher.host.record.ledger import (
    newest_known_checkpoint,
    read_ledger,
    read_ledger_or_complain,
    unended,
    write_line,
)
from launcher.host.record.log_tails import ended_by_slurm
from launcher.host.slurm import queries
from megatron_rl.contract.attempt_records import AttemptEnd, AttemptStart, Drain, NodeAssignment, Outcome
from megatron_rl.contract.codes import CRASHED, DRAINED, FINISHED, LOST, NODE_FAILURE, REQUEUE, SIGNALLED
from megatron_rl.contract.paths import FOLDERS, Attempt, RunDir
from megatron_rl.contract.records import Unreadable, if_readable, read, write
from megatron_rl.contract.run_records import Done

UNSEEN = "its batch script was killed: its node died, it had no memory left, or it did not leave in time"

RECORD_PATIENCE_S = 120.0  # seconds of retries to record an end that no later start would conclude
RECORD_AGAIN_S = 5.0  # seconds between them


class EndContext(NamedTuple):
    at: float  # unix time
    job_id: str | None = None
    host: str = ""  # default: this one
    seconds: float | None = None  # duration of the attempt; None: unknown


def close(
    run: RunDir, attempt: Attempt, job: AttemptJob, observed: Observed, request: Drain | None, began: float
) -> AttemptEnd:
    """Judge the attempt, write its end into the ledger, and start the job again where it should. This process may have
    failed to write the `request` to leave. `began` is the time.monotonic() of the attempt's start."""
    now = time.time()
    outcome = read(Outcome, attempt.outcome)
    drained = isinstance(outcome, Unreadable) or (isinstance(outcome, Outcome) and outcome.outcome == DRAINED)
    request = job.final_request(attempt, read_drain(attempt) or request, drained)
    verdict = _judge(attempt, observed, request)
    facts = job.facts(attempt, request)
    seconds = round(time.monotonic() - began, 3)
    end = conclude(run, attempt, verdict, request, facts, EndContext(now, job.job_id, seconds=seconds))
    print(f"attempt {attempt.number}: {describe_end(end, now)}")
    job.bring_back(attempt, end, facts.returning)
    return end


def conclude(
    run: RunDir, attempt: Attempt, verdict: Verdict, request: Drain | None, facts: Facts, ended: EndContext
) -> AttemptEnd:
    """Decide about the job and write the ledger's line of this end. A full disk does not stop the caller from acting on
    it: the next start reaches the same conclusion."""
    history = [line for line in read_ledger_or_complain(run) if line.attempt != attempt.number]
    decision = decide(history, verdict, request, facts)
    end = _line(attempt.number, verdict, decision, facts, ended.at)
    end = end._replace(host=ended.host or socket.gethostname(), job_id=ended.job_id, seconds=ended.seconds)
    done = Done(attempt.number, verdict.step, ended.at) if decision.outcome == FINISHED else None
    _record(run, end, done)
    return end


def _record(run: RunDir, end: AttemptEnd, done: Done | None) -> None:
    """Write the end of an attempt, and DONE after the last one. Retries where no later start could write it, which are
    the last attempt and one that this process follows with another."""
    waits = done is not None or end.then == policy.STAYS
    give_up = time.monotonic() + (RECORD_PATIENCE_S if waits else 0.0)
    while True:
        try:
            if done is not None:
                write(run.done, done)
            write_line(run, end)
            return
        except OSError as error:
            print(f"the end of attempt {end.attempt} could not be recorded: {error}", file=sys.stderr)
            if time.monotonic() >= give_up:
                return
        time.sleep(RECORD_AGAIN_S)


def _line(number: int, verdict: Verdict, decision: Decision, facts: Facts, now: float) -> AttemptEnd:
    error = verdict.error
    if decision.cause == NODE_FAILURE and decision.outcome == LOST and facts.dead:
        error = f"{', '.join(sorted(facts.dead))} went down"  # the ranks' own errors are consequences
    elif decision.outcome == CRASHED and error is None:
        error = decision.message
    return AttemptEnd(
        attempt=number,
        at=now,
        outcome=decision.outcome,
        step=verdict.step,
        error=error,
        rank=verdict.rank,
        node=verdict.node,
        phase=verdict.phase,
        hung=verdict.hung,
        checkpoint=facts.checkpoint,
        cause=decision.cause,
        then=decision.then,
        why=decision.message or verdict.why,
        crashes=decision.crashes,
        excluded=list(decision.exclude),
        not_before=now + decision.delay_s if decision.delay_s and decision.then in policy.STARTS_AGAIN else None,
        exit_code=decision.exit_code,
    )


def conclude_lost(run: RunDir, now: float, context: JobContext | None = None, unseen: str = UNSEEN) -> None:
    """Conclude the attempts whose end nobody has recorded, with the error `unseen` where the ranks left none. Only the
    owner of the run may. Without Slurm there is no context. Raises OSError where the ledger cannot be read."""
    for start in unended(read_ledger(run)):
        _conclude_unseen(run, start, now, context, unseen)


def _judge(attempt: Attempt, observed: Observed, request: Drain | None) -> Verdict:
    verdict = verdict_of(read_evidence(attempt, observed, request))
    for kind in FOLDERS:
        verdict = without_replicas(verdict, read_replicas(attempt, kind), kind)
    return verdict


def _conclude_unseen(run: RunDir, start: AttemptStart, now: float, context: JobContext | None, unseen: str) -> None:
    attempt = run.attempt(start.attempt)
    request = read_drain(attempt)
    verdict = _judge(attempt, Observed(unseen=unseen), request)
    dead = dead_nodes(start.nodes)
    if verdict.outcome in (LOST, DRAINED):
        cause = _cause_of_end(run, start, request, dead)
        request = (request or Drain(cause, "nobody who is known", now))._replace(cause=cause) if cause else None
    came_back = context is not None and start.job_id == context.job_id and context.restarts > start.restart
    succeeded = context is not None and context.succeeds is not None and start.job_id == context.succeeds
    assignment = if_readable(read(NodeAssignment, attempt.nodes))
    facts = Facts(
        checkpoint=newest_known_checkpoint(run),
        can_return=came_back or succeeded,
        requeueable=not succeeded,
        returning=came_back,
        bad=to_exclude(assignment.bad, unfit_before(run, attempt)) if assignment else [],
        dead=dead,
    )
    if verdict.outcome == FINISHED and _was_changed_since(run, attempt):  # the recipe has more steps now
        over = AttemptEnd(start.attempt, now, FINISHED, step=verdict.step, checkpoint=facts.checkpoint)
        over = over._replace(host=start.host, then=policy.OVER, why=verdict.why, job_id=start.job_id)
        write_line(run, over)
        return
    conclude(run, attempt, verdict, request, facts, EndContext(now, start.job_id, start.host))


def _cause_of_end(run: RunDir, start: AttemptStart, request: Drain | None, dead: list[str]) -> str | None:
    asked = request.cause if request else None
    if asked not in (None, SIGNALLED, REQUEUE) or start.job_id is None:
        return asked
    recorded = ended_by_slurm(run, start) or OF_ENDED.get(queries.ended_as(start.job_id, start.at) or "")
    return recorded or (NODE_FAILURE if dead else asked)


def _was_changed_since(run: RunDir, attempt: Attempt) -> bool:
    return run.changes.exists() and run.changes.stat().st_mtime_ns > attempt.outcome.stat().st_mtime_ns
