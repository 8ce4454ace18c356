"""The failure of an attempt, by its files: a message, and the end of the traceback or of the log."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from launcher.host.judge.policy import found_disk_full
from launcher.host.judge.sentence import describe_end
from launcher.host.record.log_tails import tail
from launcher.runs.state import last_line
from megatron_rl.contract.attempt_records import AttemptEnd, Drain, RankError
from megatron_rl.contract.codes import DRAINED, FINISHED, STOPPED
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.records import if_readable, read

TRACEBACK_LINES = 12
LOG_LINES = 20


class RunFailure(NamedTuple):
    message: str
    shown: Sequence[str]
    """End of the traceback if the rank left one, else the end of its log; empty where no rank is to blame."""
    log: Path


def failure_of_run(run: RunDir) -> RunFailure | None:
    end = last_line(run)
    if not isinstance(end, AttemptEnd) or end.outcome in (FINISHED, DRAINED, STOPPED):
        return None
    return failure_of(run.attempt(end.attempt), end)


def failure_of(attempt: Attempt, end: AttemptEnd) -> RunFailure:
    if found_disk_full(end.error):  # files that a rank wrote then are incomplete
        return RunFailure(describe_end(end, time.time()), [], attempt.logs)
    if end.rank is None:
        drain = if_readable(read(Drain, attempt.drain))
        killed = drain is not None and (math.inf if drain.deadline is None else drain.deadline) <= drain.at
        what = f"killed before it could save: {drain.cause}" if drain and killed else f"failed: {end.error}"
        return RunFailure(what, [], attempt.logs)
    error, log = if_readable(read(RankError, attempt.error(end.rank))), attempt.log(end.rank)
    if error is None:
        phase = f" ({end.phase})" if end.phase else ""
        place = f" in step {end.step}{phase}" if end.step is not None else ""
        last = tail(log, 200 * LOG_LINES).splitlines()[-LOG_LINES:]
        return RunFailure(f"failed: rank {end.rank}{place}: {end.error}", last, log)
    place = f"in step {error.step} ({error.phase})"
    trace = error.traceback.rstrip().splitlines()[-TRACEBACK_LINES:]
    return RunFailure(f"failed: rank {end.rank} {place}: {error.error}", trace, log)
