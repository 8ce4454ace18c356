"""The second half of the batch script's host side: have the attempt leave, judge it, decide what becomes of the job."""

import argparse
import sys
import time
from typing import Any, Dict, Optional

from launcher.host import goodput, ledger, policy, slurm
from launcher.host.here import Here, ask_to_leave
from launcher.host.verdict import CRASHED, DRAINED, FINISHED, Verdict, in_words, judge
from megatron_rl.run_dir import EXIT_FINISHED, Attempt, RunDir, read_json, read_json_lines, write_json

GRACE_ON_RECORD = 10.0  # seconds
SIGNAL_BASE = 128  # srun reports a task that a signal ended as this plus the signal


def drain(here: Here, options: argparse.Namespace) -> int:
    """The batch script caught a signal: find out why, and ask the attempt to leave."""
    if not here.attempt.drain.exists():
        cause = _cause(here, options, slurm.TIME_LIMIT)
        ask_to_leave(here.attempt, cause.cause, "SIG{} to the batch script".format(options.signal), cause.deadline)
        if cause.cause == policy.PREEMPTED and cause.deadline is None:
            _add_deadline(here, options)
    return EXIT_FINISHED


def _add_deadline(here: Here, options: argparse.Namespace) -> None:
    """Slurm may signal a preempted job before it has put the end of its grace time on record."""
    give_up = time.monotonic() + GRACE_ON_RECORD
    while time.monotonic() < give_up:
        time.sleep(0.5)
        deadline = _cause(here, options, 0.0).deadline
        if deadline is not None:
            write_json(here.attempt.drain, dict(read_json(here.attempt.drain), deadline=deadline))
            return


def close(here: Here, options: argparse.Namespace) -> int:
    """Judge the attempt, write its end into the ledger, and decide what becomes of the job."""
    run, attempt, now = here.run, here.attempt, time.time()
    request = _request(here, options)
    verdict = _verdict(attempt, request, options)
    bad = (read_json(attempt.nodes) or {}).get("bad", {})
    cause = request["cause"] if request else None
    decision = policy.decide(verdict, request, _may_requeue(here), slurm.version(), _in_vain(run, cause))
    if decision.outcome == FINISHED:
        write_json(run.done, {"attempt": attempt.number, "step": verdict.step, "at": now})
    ledger.record(
        run,
        attempt.number,
        "end",
        now,
        job_id=here.job_id,
        outcome=decision.outcome,
        step=verdict.step,
        error=verdict.error or (decision.message if decision.outcome == CRASHED else None),
        rank=verdict.rank,
        cause=cause,
        seconds=round(now - float(options.began), 3),
    )
    print("attempt {}: {}".format(attempt.number, decision.message))
    if decision.requeue:
        # This sends SIGTERM to everything here, which the script has us ignore: there are some seconds left.
        slurm.patiently(lambda: slurm.requeue(here.job_id))
        if bad:
            slurm.patiently(lambda: slurm.exclude(here.job_id, sorted(bad)))
    goodput.write(run, now)
    return decision.exit_code


def _request(here: Here, options: argparse.Namespace) -> Optional[Dict[str, Any]]:
    """The drain file. Slurm is asked once more: what began as a preemption may have become a cancellation, and ranks
    may have left on a signal that never came by here."""
    attempt = here.attempt
    request = read_json(attempt.drain)
    outcome = read_json(attempt.outcome)
    if request is None and (outcome is None or outcome["outcome"] != DRAINED):
        return None
    cause = _cause(here, options, slurm.PATIENCE)
    if request is None or (cause.cause == policy.CANCELLED and request["cause"] != policy.CANCELLED):
        by = "a signal to the steps" if request is None else "Slurm's record"
        request = {"cause": cause.cause, "by": by, "at": time.time(), "deadline": cause.deadline}
        write_json(attempt.drain, request)
    return dict(request)


def _cause(here: Here, options: argparse.Namespace, patience: float) -> policy.Cause:
    try:
        job = slurm.patiently(lambda: slurm.show_job(here.job_id), patience)
    except slurm.SlurmRefused as error:
        print(error, file=sys.stderr)
        return policy.Cause(policy.SIGNALLED, None)
    deadline = (read_json(here.attempt.drain) or {}).get("deadline")
    return policy.cause_of(job, time.time(), options.notice, here.restarts, deadline)


def _may_requeue(here: Here) -> bool:
    """Not somebody's salloc, and not a job that was submitted with --no-requeue."""
    try:
        job = slurm.patiently(lambda: slurm.show_job(here.job_id))
    except slurm.SlurmRefused as error:
        print(error, file=sys.stderr)
        return True  # not known to be impossible, and trying does no harm
    return job.get("BatchFlag") == "1" and job.get("Requeue") == "1"


def _in_vain(run: RunDir, cause: Optional[str]) -> int:
    """Attempts just before this one that ended for the same cause with nothing new saved."""
    ends = [line for line in read_json_lines(run.attempts_ledger) if line["event"] == "end"]
    same = [line.get("cause") == cause and line.get("step") is None for line in reversed(ends)]
    return (same + [False]).index(False)


def _verdict(attempt: Attempt, request: Optional[Dict[str, Any]], options: argparse.Namespace) -> Verdict:
    errors = [read_json(path) for path in sorted(attempt.errors(), key=lambda path: path.stat().st_mtime_ns)]
    outcome = read_json(attempt.outcome)
    if errors or outcome is not None:
        return judge(errors, outcome, {}, None)
    code = None if options.code is None else int(options.code)
    if request is not None and (code is None or code > SIGNAL_BASE):
        return Verdict(DRAINED, None, None, None)  # asked to leave, and gone before anything could be saved
    if code is None:
        return Verdict(CRASHED, None, options.unready or "the steps could not be started", None)
    said = in_words(SIGNAL_BASE - code if code > SIGNAL_BASE else code)
    return Verdict(CRASHED, None, "the training step {} and recorded no outcome".format(said), None)
