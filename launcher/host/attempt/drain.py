"""A request to leave: written by the batch script when it catches a signal, completed from Slurm's record."""

import argparse
import sys
import time
from typing import Dict, Optional

from launcher.host.attempt.context import Here, ask_to_leave
from launcher.host.judge.causes import REQUEUE, SIGNALLED, Cause, cause_of, completed, is_complete
from launcher.host.record import ledger
from launcher.host.record.evidence import ended_by_slurm
from launcher.host.slurm import client
from megatron_rl.contract.codes import EXIT_FINISHED
from megatron_rl.run_dir import read_json, write_json


def drain(here: Here, options: argparse.Namespace) -> int:
    """The batch script caught a signal: ask the attempt to leave, and find out why."""
    if not here.attempt.drain.exists():
        # At once: a controller that preempts many jobs answers late, and the grace time runs.
        ask_to_leave(here.attempt, SIGNALLED, "SIG{} to the batch script".format(options.signal))
        complete(here, options.notice, client.TIME_LIMIT)
    return EXIT_FINISHED


def complete(here: Here, notice: float, patience: float = 0.0) -> None:
    """Add to an incomplete request what Slurm's record knows by now. A rank that a signal reached alone cannot ask, and
    Slurm may signal a job before it has put the end of its grace time on record."""
    request = read_json(here.attempt.drain)
    if request is None or is_complete(request):
        return
    cause = ask_cause(here, notice, patience)
    fuller = completed(request, cause, _deadline(cause))
    if fuller != request and read_json(here.attempt.drain) == request:  # or somebody has named a cause meanwhile
        write_json(here.attempt.drain, fuller)


def ask_cause(here: Here, notice: float, patience: float) -> Cause:
    """Why Slurm signals this job; that nobody knows, where Slurm cannot be asked."""
    try:
        return read_cause(here, client.patiently(lambda: client.show_job(here.job_id), patience), notice)
    except client.SlurmRefused as error:
        print(error, file=sys.stderr)
        return Cause(SIGNALLED, None)


def read_cause(here: Here, job: Dict[str, str], notice: float) -> Cause:
    """The same of a record that is at hand."""
    end = (read_json(here.attempt.drain) or {}).get("end")
    cause = cause_of(job, time.time(), notice, here.restarts, end, client.preemption_cancels(job))
    start = ledger.start_of(here.run, here.attempt.number)
    if cause.cause not in (REQUEUE, SIGNALLED) or start is None:
        return cause
    return cause._replace(cause=ended_by_slurm(here.run, start) or cause.cause)


def _deadline(cause: Cause) -> Optional[float]:
    """A job that Slurm ends at once still has the seconds until it is killed."""
    if cause.end is None or cause.end > time.time():
        return cause.end
    return cause.end + client.kill_wait()
