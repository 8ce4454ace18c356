"""Begin an attempt: create its folders, enter it in the ledger."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from typing import NamedTuple

from launcher.host.attempt.job_context import JobContext
from launcher.host.judge.policy import STAYS
from launcher.host.record.goodput import generating_gpus
from launcher.host.record.ledger import newest_line, point_latest, write_line
from megatron_rl.contract.attempt_records import AttemptEnd, AttemptStart, Drain
from megatron_rl.contract.paths import Attempt
from megatron_rl.contract.plan_records import PlanRecord
from megatron_rl.contract.records import if_readable, read, read_or_raise, write
from megatron_rl.contract.run_records import CodeSnapshot, Owner


def next_attempt(context: JobContext) -> Attempt:
    attempt = context.run.attempt(context.run.last_attempt() + 1)
    attempt.folder.mkdir(parents=True)
    return attempt


def begin_attempt(context: JobContext, attempt: Attempt) -> None:
    """Enter an attempt in the ledger, and create the folder of its logs.

    After an OSError it may be tried again. The disk may have kept the line although the write failed: of several lines
    for one attempt the last counts.
    """
    attempt.logs.mkdir(parents=True, exist_ok=True)
    _take_over_request(context, attempt)
    write_line(context.run, _start(context, attempt))
    try:
        point_latest(attempt, context.job_id)
    except OSError as error:
        print(f"{attempt.latest_logs}: {error}", file=sys.stderr)


def forget_attempt(attempt: Attempt) -> None:
    shutil.rmtree(str(attempt.folder), ignore_errors=True)
    shutil.rmtree(str(attempt.logs), ignore_errors=True)


class CodePaths(NamedTuple):
    folder: str  # code-NNN, which no later --update-code replaces
    pythonpath: str


def code_paths(context: JobContext) -> CodePaths:
    """Working directory and PYTHONPATH of the steps. Raises OSError."""
    code = context.run.code
    # Not realpath: containers mount the run directory under the name that the user gave.
    root = str(context.run.root / os.readlink(code) if code.is_symlink() else code)
    record = read_or_raise(CodeSnapshot, context.run.code_record)
    if record is None:
        raise FileNotFoundError(f"{context.run.code_record}: the snapshot of the code is missing")
    paths = [os.path.normpath(os.path.join(root, part)) for part in record.pythonpath]
    return CodePaths(root, ":".join(paths))


def _start(context: JobContext, attempt: Attempt) -> AttemptStart:
    now = time.time()
    owner, plan = if_readable(read(Owner, context.run.job)), if_readable(read(PlanRecord, context.run.plan))
    submitted_at = owner.submitted_at if owner else now
    return AttemptStart(
        attempt=attempt.number,
        at=now,
        host=socket.gethostname(),
        job_id=context.job_id,
        cluster=context.cluster,
        restart=context.restarts,
        nodes=context.hosts,
        gpus=len(context.hosts) * plan.gpus_per_node if plan else 0,
        generating=generating_gpus(plan) if plan else 0,
        submitted_at=submitted_at,
        # An allocation of the user's (salloc) began before it had anything to do with this run.
        held_since=max(submitted_at, context.held_since or now),
    )


def _take_over_request(context: JobContext, attempt: Attempt) -> None:
    """Copy a request to leave that reached the previous attempt after its end: it was meant for this job."""
    end = newest_line(context.run)
    if isinstance(end, AttemptEnd) and end.then == STAYS:
        request = if_readable(read(Drain, context.run.attempt(end.attempt).drain))
        if request is not None and request.at > end.at:
            write(attempt.drain, Drain(request.cause, request.by, time.time()))
