"""The end of an attempt: judge what it left, decide what becomes of the job, write both down. Nothing is done yet.

Whoever comes first does it: the batch script that saw the end, or the next start, where the script was killed or could
not write. Both go by the same files and so conclude the same.
"""

import math
import sys
from typing import Any, Dict, List, Optional

from launcher.host.attempt.assignment import is_dead
from launcher.host.attempt.context import Here
from launcher.host.attempt.watch import LAST_MOMENT
from launcher.host.judge import policy
from launcher.host.judge.causes import NODE_FAILURE, OF_ENDED, PREEMPTED, REQUEUE, SIGNALLED
from launcher.host.judge.policy import Decision, Facts
from launcher.host.judge.verdict import DRAINED, FINISHED, LOST, Verdict
from launcher.host.record import ledger
from launcher.host.record.evidence import Death, ended_by_slurm, read_errors, verdict_of
from launcher.host.slurm import client
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.run_dir import read_json, read_json_lines, write_json

UNSEEN = "its batch script was killed: its node died, it had no memory left, or it did not leave in time"


def own_words(attempt: Attempt, death: Optional[Death] = None) -> Optional[Verdict]:
    """The verdict by what the ranks wrote, and by what srun said of the first that ended badly; None without either."""
    before = _ended_at(attempt)
    if not (death or read_errors(attempt, before) or attempt.outcome.exists() or attempt.hang.exists()):
        return None
    verdict = verdict_of(attempt, {death.rank: death.code} if death else {}, before=before)
    return verdict._replace(node=death.host) if death and verdict.rank == death.rank else verdict


def _ended_at(attempt: Attempt) -> float:
    """When ranks that were asked to leave are ended: those that go first leave the others without a peer."""
    deadline = (read_json(attempt.drain) or {}).get("deadline")
    return math.inf if deadline is None else float(deadline) - LAST_MOMENT


def conclude(
    run: RunDir,
    attempt: Attempt,
    verdict: Verdict,
    request: Optional[Dict[str, Any]],
    facts: Facts,
    now: float,
    **more: Any,
) -> Dict[str, Any]:
    """Decide, and write it down: the ledger's line of this end. A disk that is full keeps nobody from acting on it:
    the next start comes to the same conclusion.

    Args:
        more: further facts for the line.
    """
    history = [line for line in read_json_lines(run.attempts_ledger) if line["attempt"] != attempt.number]
    decision = policy.decide(history, verdict, request, facts)
    line = _line(verdict, decision, facts, now)
    line.update(more)
    try:
        if decision.outcome == FINISHED:
            write_json(run.done, {"attempt": attempt.number, "step": verdict.step, "at": now})
        ledger.end(run, attempt.number, now, verdict, **line)
    except OSError as error:
        print("the end of attempt {} could not be recorded: {}".format(attempt.number, error), file=sys.stderr)
    return dict(verdict._asdict(), attempt=attempt.number, **line)


def _line(verdict: Verdict, decision: Decision, facts: Facts, now: float) -> Dict[str, Any]:
    error = verdict.error
    if decision.cause == NODE_FAILURE and decision.outcome == LOST and facts.dead:
        error = "{} went down".format(", ".join(sorted(facts.dead)))  # what the ranks said of it is a consequence
    elif decision.outcome == policy.CRASHED and error is None:
        error = decision.message
    return {
        "outcome": decision.outcome,
        "cause": decision.cause,
        "error": error,
        "then": decision.then,
        "why": decision.message,
        "crashes": decision.crashes,
        "excluded": list(decision.exclude),
        "not_before": now + decision.delay_s if decision.delay_s and decision.then in policy.STARTS_AGAIN else None,
        "exit_code": decision.exit_code,
    }


def conclude_lost(run: RunDir, now: float, here: Optional[Here] = None, unseen: str = UNSEEN) -> None:
    """End the attempts that started and whose end nobody has recorded. For the owner of the run only.

    Args:
        here: the job that runs now; None on a machine without Slurm.
        unseen: what is said of an attempt whose ranks left no word.
    """
    for start in ledger.unended(run):
        _conclude_unseen(run, start, now, here, unseen)


def _conclude_unseen(run: RunDir, start: Dict[str, Any], now: float, here: Optional[Here], unseen: str) -> None:
    attempt = run.attempt(start["attempt"])
    request, verdict = read_json(attempt.drain), own_words(attempt)
    dead = dead_nodes(start.get("nodes", []))
    if verdict is None or verdict.outcome == DRAINED:
        cause = _cause_of_end(run, start, request, dead)
        request = dict(request or {}, cause=cause) if cause else None
    if verdict is None:
        verdict = Verdict(LOST, None, unseen, None)
    came_back = here is not None and start.get("job_id") == here.job_id and here.restarts > start.get("restart", 0)
    succeeded = here is not None and here.succeeds is not None and start.get("job_id") == here.succeeds
    facts = Facts(
        checkpoint=ledger.newest_checkpoint(run),
        can_return=came_back or succeeded,
        requeueable=not succeeded,
        returning=came_back,
        bad=sorted((read_json(attempt.nodes) or {}).get("bad", {})),
        dead=dead,
    )
    reopened = run.changes.exists() and verdict.outcome == FINISHED and _newer(run.changes, attempt.outcome)
    if reopened:  # with more steps than it had then
        ledger.end(run, attempt.number, now, verdict, cause=None, then=policy.OVER, job_id=start.get("job_id"))
        return
    conclude(run, attempt, verdict, request, facts, now, host=start["host"], job_id=start.get("job_id"))


def _cause_of_end(
    run: RunDir, start: Dict[str, Any], request: Optional[Dict[str, Any]], dead: List[str]
) -> Optional[str]:
    """Why the batch script was killed: who asked it to leave, or what Slurm has on record."""
    asked = request["cause"] if request else None
    job_id = start.get("job_id")
    if asked not in (None, SIGNALLED, REQUEUE) or job_id is None:
        return asked
    told = ended_by_slurm(run, start) or OF_ENDED.get(client.ended_as(str(job_id), start["at"]) or "")
    return told or (NODE_FAILURE if dead else asked)


def dead_nodes(hosts: List[str]) -> List[str]:
    """Those of the nodes that Slurm has lost; none where it cannot be asked."""
    try:
        states = client.node_states(hosts) if hosts else {}
    except client.SlurmRefused as error:
        print(error, file=sys.stderr)
        return []
    return sorted(host for host, state in states.items() if is_dead(state))


def preempted_by_cancelling(request: Optional[Dict[str, Any]], job: Dict[str, str]) -> bool:
    """Whether Slurm will not requeue a job that it preempts."""
    return bool(request and request["cause"] == PREEMPTED) and client.preemption_cancels(job)


def _newer(path: Any, than: Any) -> bool:
    return bool(path.stat().st_mtime_ns > than.stat().st_mtime_ns)
