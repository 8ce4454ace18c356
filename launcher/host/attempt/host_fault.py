"""The batch host or its file system fails: the job comes back, elsewhere or later, instead of ending the run.

Only a refusal is final. How often a job may come back like this is bounded by what needs no file: the number of its
restarts since an attempt of it last began.
"""

from __future__ import annotations

import sys
import time

from launcher.host.attempt.job_context import FAULTS_VARIABLE, JobContext
from launcher.host.attempt.slurm_job import show_job_or_complain
from launcher.host.attempt.start_again import start_again
from launcher.host.judge.causes import has_script, is_requeueable
from launcher.host.judge.policy import OVER, ROOM_AGAIN_S, Facts, who_starts_it
from launcher.host.record.ledger import read_ledger_or_complain, starts_in
from megatron_rl.contract.attempt_records import AttemptEnd, LedgerLine
from megatron_rl.contract.codes import EXIT_CRASHED, EXIT_DRAINED, HOST_TRIES, LOST
from megatron_rl.contract.files import FULL


def come_back(context: JobContext, error: Exception, script: str) -> int:
    """Have the job start again, before an attempt has begun: nothing is lost by then, and nobody may be there to resume
    the run. Returns the exit code.

    Args:
        script: that runs this job; the run directory may not hold one yet, or cannot be read.
    """
    job = show_job_or_complain(context.job_id)
    facts = Facts(can_return=has_script(job), requeueable=is_requeueable(job))
    then, full = who_starts_it(facts), getattr(error, "errno", None) in FULL
    history = read_ledger_or_complain(context.run)
    tries = 0 if full else context.faults + context.restarts - _restarts_at_last_start(context, history)
    where = f"{context.run.root} on {context.batch_host}: {error}"
    if then == OVER or tries >= HOST_TRIES:
        why = "" if then == OVER else f" {tries} starts in a row came to nothing;"
        print(f"error: {where};{why} nothing is lost, mrl resume goes on", file=sys.stderr)
        return EXIT_DRAINED if full else EXIT_CRASHED
    if full:
        what = f"make room, the job comes back in {ROOM_AGAIN_S / 60:.0f} min"
    else:
        what = "the job comes back without this host"
    print(f"error: {where}; nothing is lost: {what}", file=sys.stderr)
    back = AttemptEnd(
        attempt=max([line.attempt for line in history] or [0]) + 1,
        at=time.time(),
        outcome=LOST,
        then=then,
        excluded=[] if full else [context.batch_host],
        not_before=time.time() + ROOM_AGAIN_S if full else None,
    )
    start_again(context, back, script, {FAULTS_VARIABLE: str(tries)})
    return EXIT_DRAINED


def _restarts_at_last_start(context: JobContext, history: list[LedgerLine]) -> int:
    """How often this job had been requeued when an attempt of it last began; -1: none has."""
    return max([start.restart for start in starts_in(history) if start.job_id == context.job_id] or [-1])
