"""Lines printed after an attempt has ended. Reads the attempt's files and decides nothing."""

from __future__ import annotations

import math
import shlex
import time

from launcher.cli.show.history import RECENT, History, clock, mean
from launcher.cli.show.log_lines import last_lines
from launcher.cli.show.scores import lines as evaluation_lines
from launcher.cli.show.scores import result_of
from launcher.host.judge.policy import found_disk_full
from launcher.host.judge.sentence import describe_end
from launcher.job.admission import has_work
from launcher.runs.state import result_file
from megatron_rl.contract.attempt_records import AttemptEnd, Drain, RankError
from megatron_rl.contract.codes import (
    CRASHED,
    DRAINED,
    EXIT_CRASHED,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    FINISHED,
    MISCONFIGURED,
    STOPPED,
)
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.records import if_readable, read

EXIT_CODES = {
    FINISHED: EXIT_FINISHED,
    DRAINED: EXIT_INTERRUPTED,
    STOPPED: EXIT_INTERRUPTED,
    CRASHED: EXIT_CRASHED,
    MISCONFIGURED: EXIT_USAGE,
}
FIRST = 10  # steps averaged for the first mean reward
TRACEBACK_LINES = 12
LOG_LINES = 20


def ending_lines(run: RunDir, attempt: Attempt, end: AttemptEnd, history: History, resume: str) -> list[str]:
    """Return lines about how an attempt ended, the results so far, and how to resume.

    Args:
        resume: the command that resumes this run.
    """
    out = result_file(run)
    if end.outcome == FINISHED:
        took = f", this attempt took {clock(end.seconds)}" if end.seconds is not None else ""
        lines = [f"finished: {history.step} steps{took}" if out is None else f"finished{took}"]
    elif end.outcome in (DRAINED, STOPPED):
        lines = [describe_end(end, time.time())]
    else:
        lines = failure_lines(attempt, end)
    if out is not None:
        result = result_of(run) if end.outcome == FINISHED else None
        lines += evaluation_lines(result, str(out)) if result else [f"files:       {run.root}"]
        return lines if end.outcome == FINISHED else [*lines, _next(run, end, resume)]
    lines += result_lines(history)
    lines += [f"warning:         {warning}" for warning in history.warnings]
    lines += [
        f"files:       {run.root}",
        f"tensorboard: tensorboard --logdir {shlex.quote(str(run.tensorboard))}",
    ]
    return lines if end.outcome == FINISHED else [*lines, _next(run, end, resume)]


def _next(run: RunDir, end: AttemptEnd, resume: str) -> str:
    """Return the line about how to go on. A wrong configuration would end the next attempt in the same way, and a run
    that holds no work yet takes other values only from a recipe."""
    if end.outcome != MISCONFIGURED:
        return f"resume:      {resume}"
    if not has_work(run) and not resume.startswith("mrl-submit"):
        resume = f"mrl-submit RECIPE --run-dir {shlex.quote(str(run.root))}"
    return f"next:        correct it, then {resume}"


def failure_lines(attempt: Attempt, end: AttemptEnd) -> list[str]:
    """Return the failure, with the end of the traceback if the rank left one, else the end of its log."""
    if found_disk_full(end.error):  # files that a rank wrote then are incomplete
        return [describe_end(end, time.time()), f"logs: {attempt.logs}"]
    if end.rank is None:
        drain = if_readable(read(Drain, attempt.drain))
        killed = drain is not None and (math.inf if drain.deadline is None else drain.deadline) <= drain.at
        what = f"killed before it could save: {drain.cause}" if drain and killed else f"failed: {end.error}"
        return [what, f"logs: {attempt.logs}"]
    error, log = if_readable(read(RankError, attempt.error(end.rank))), attempt.log(end.rank)
    if error is None:
        phase = f" ({end.phase})" if end.phase else ""
        place = f" in step {end.step}{phase}" if end.step is not None else ""
        shown = indented(last_lines(log, LOG_LINES))
        return [f"failed: rank {end.rank}{place}: {end.error}", *shown, f"log: {log}"]
    place = f"in step {error.step} ({error.phase})"
    trace = error.traceback.rstrip().splitlines()[-TRACEBACK_LINES:]
    return [f"failed: rank {end.rank} {place}: {error.error}", *indented(trace), f"log: {log}"]


def indented(lines: list[str]) -> list[str]:
    """Indent lines of other programs."""
    return [f"  | {line}" for line in lines]


def result_lines(history: History) -> list[str]:
    """Return first and last mean reward, and the greedy accuracy before and after training on each set."""
    lines = []
    rewards = history.rewards()
    if rewards:
        first, last = rewards[:FIRST], rewards[-RECENT:]
        lines.append(
            f"mean reward:     {mean(first):.3f} (first {len(first)} steps) -> {mean(last):.3f} (last {len(last)})"
        )
    for name, (before, after) in sorted(history.accuracies().items()):
        trained = f" -> {after:.3f}" if len(history.evaluations) > 1 else " before training"
        lines.append(f"greedy accuracy: {before:.3f}{trained} on {name}")
    return lines
