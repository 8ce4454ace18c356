"""The end of an attempt, seen by the process that ran it: judged, recorded, and acted on."""

import time
from typing import Optional

from launcher.host.attempt.conclude import conclude
from launcher.host.attempt.surroundings import Surroundings
from launcher.host.judge.sentence import describe_end
from launcher.host.judge.verdict import judge
from launcher.host.record.evidence import Observed, read_drain, read_evidence
from launcher.host.record.goodput import write_usage
from megatron_rl.contract.attempt_records import AttemptEnd, Drain, Outcome
from megatron_rl.contract.codes import DRAINED
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.records import Unreadable, read


def close(
    run: RunDir,
    attempt: Attempt,
    surroundings: Surroundings,
    observed: Observed,
    request: Optional[Drain],
    began: float,
) -> AttemptEnd:
    """Judge the attempt, write its end into the ledger, and have the job start again where it should.

    Args:
        observed: of its end, by this process.
        request: to leave, that this process knows of and may not have been able to write.
        began: unix time.
    """
    now = time.time()
    outcome = read(Outcome, attempt.outcome)
    drained = isinstance(outcome, Unreadable) or (isinstance(outcome, Outcome) and outcome.outcome == DRAINED)
    request = surroundings.final_request(attempt, read_drain(attempt) or request, drained)
    verdict = judge(read_evidence(attempt, observed, request))
    facts = surroundings.facts(attempt, request)
    seconds = round(now - began, 3)
    end = conclude(run, attempt, verdict, request, facts, now, job_id=surroundings.job_id, seconds=seconds)
    print("attempt {}: {}".format(attempt.number, describe_end(end, now)))
    surroundings.bring_back(attempt, end, facts.returning)
    write_usage(run, now)
    return end
