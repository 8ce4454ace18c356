"""The second half of the batch script's host side: judge the attempt, and do about the job what the policy says."""

import argparse
import sys
import time
from typing import Any, Dict, Optional

from launcher.host.attempt.assignment import suffice
from launcher.host.attempt.conclude import conclude, dead_nodes, own_words, preempted_by_cancelling
from launcher.host.attempt.context import Here
from launcher.host.attempt.drain import read_cause
from launcher.host.attempt.start_again import bring_back
from launcher.host.judge.causes import is_returning, is_truer
from launcher.host.judge.policy import Facts
from launcher.host.judge.sentence import in_words as end_in_words
from launcher.host.judge.verdict import CRASHED, DRAINED, Verdict, in_words
from launcher.host.record import goodput, ledger
from launcher.host.record.evidence import SIGNAL_BASE, first_death
from launcher.host.slurm import client
from megatron_rl.run_dir import read_json, write_json


def close(here: Here, options: argparse.Namespace) -> int:
    """Judge the attempt, write its end into the ledger, and have the job start again where it should."""
    run, attempt, now = here.run, here.attempt, time.time()
    job = read_record(here)
    request = _request(here, job, options.notice)
    verdict = _verdict(here, request, options)
    hosts = client.hostnames(here.nodelist)
    bad, dead = (read_json(attempt.nodes) or {}).get("bad", {}), dead_nodes(hosts)
    facts = Facts(
        checkpoint=ledger.newest_checkpoint(run),
        # Where Slurm does not answer, it is not known to be impossible, and trying does no harm.
        can_return=job.get("BatchFlag", "1") == "1",
        requeueable=job.get("Requeue", "1") == "1",
        returning=is_returning(job, here.restarts),
        slurm=client.version(),
        preemption_cancels=preempted_by_cancelling(request, job),
        bad=sorted(bad),
        dead=dead,
        suffice=options.here and suffice(read_json(run.plan) or {}, set(hosts) - set(bad) - set(dead)),
        backoff_s=options.backoff,
    )
    seconds = round(now - float(options.began), 3)
    end = conclude(run, attempt, verdict, request, facts, now, job_id=here.job_id, seconds=seconds)
    print("attempt {}: {}".format(attempt.number, end_in_words(end, now)))
    bring_back(here, attempt, end, facts.returning)
    goodput.write(run, now)
    return int(end["exit_code"])


def read_record(here: Here) -> Dict[str, str]:
    """Slurm's record of this job; empty where it does not answer."""
    try:
        return client.patiently(lambda: client.show_job(here.job_id))
    except client.SlurmRefused as error:
        print(error, file=sys.stderr)
        return {}


def _request(here: Here, job: Dict[str, str], notice: float) -> Optional[Dict[str, Any]]:
    """The drain file. Slurm is asked once more: what began as a preemption may have become a cancellation, and ranks
    may have left on a signal that never came by here."""
    attempt = here.attempt
    request, outcome = read_json(attempt.drain), read_json(attempt.outcome)
    if request is None and (outcome is None or outcome["outcome"] != DRAINED):
        return None
    cause = read_cause(here, job, notice)
    if request is None:
        request = {"cause": cause.cause, "by": "a signal to the steps", "at": time.time(), "deadline": cause.end}
    elif is_truer(cause.cause, request["cause"]):
        request = dict(request, cause=cause.cause)
    else:
        return dict(request)
    try:
        write_json(attempt.drain, request)
    except OSError as error:
        print(error, file=sys.stderr)
    return dict(request)


def _verdict(here: Here, request: Optional[Dict[str, Any]], options: argparse.Namespace) -> Verdict:
    # Ranks that were asked to leave and did not are killed: that says nothing about them.
    words = own_words(here.attempt, first_death(here.attempt) if request is None else None)
    if words is not None:
        return words
    code = None if options.code is None else int(options.code)
    if request is not None and (code is None or code > SIGNAL_BASE):
        return Verdict(DRAINED, None, None, None)  # asked to leave, and gone before anything could be saved
    if code is None:
        return Verdict(CRASHED, None, options.unready or "the steps could not be started", None)
    said = in_words(SIGNAL_BASE - code if code > SIGNAL_BASE else code)
    return Verdict(CRASHED, None, "the training step {} and recorded no outcome".format(said), None)
