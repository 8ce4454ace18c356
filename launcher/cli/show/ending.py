"""Pure but for reading the attempt's files: what the user is told when an attempt has ended."""

from __future__ import annotations

import math
import shlex
from typing import Any

from launcher.cli.show.progress import RECENT, Status, clock, mean
from launcher.cli.submit.follow import log_tail
from launcher.host.judge.policy import STOPPED
from launcher.host.judge.sentence import in_words
from launcher.host.judge.verdict import CRASHED, DRAINED, FINISHED, MISCONFIGURED
from megatron_rl.contract.codes import EXIT_CRASHED, EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_USAGE
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.run_dir import read_json

EXIT_CODES = {
    FINISHED: EXIT_FINISHED,
    DRAINED: EXIT_INTERRUPTED,
    CRASHED: EXIT_CRASHED,
    MISCONFIGURED: EXIT_USAGE,
}
FIRST = 10  # steps behind the first mean reward
TRACEBACK_LINES = 12
LOG_LINES = 20


def account(run: RunDir, attempt: Attempt, end: dict[str, Any], status: Status, resume: str) -> list[str]:
    """Lines for the user.

    Args:
        end: the supervisor's last ledger line.
        resume: the command that goes on with this run.
    """
    if end["outcome"] == FINISHED:
        lines = [f"finished: {status.step} steps, this attempt took {clock(end['seconds'])}"]
    elif end["outcome"] in (DRAINED, STOPPED):
        lines = [in_words(end, end["at"])]
    else:
        lines = failure(attempt, end)
    lines += results(status)
    lines += [
        f"files:       {run.root}",
        f"tensorboard: tensorboard --logdir {shlex.quote(str(run.tensorboard))}",
    ]
    return lines if end["outcome"] == FINISHED else [*lines, f"resume:      {resume}"]


def failure(attempt: Attempt, end: dict[str, Any]) -> list[str]:
    """What failed, with the traceback's end where the rank could leave one, else the log's."""
    rank = end.get("rank")
    drain = read_json(attempt.drain)
    if rank is None and drain is not None and (drain["deadline"] or math.inf) <= drain["at"]:
        return [f"killed before it had saved: {drain['cause']}", f"logs: {attempt.logs}"]
    if rank is None:
        return [f"failed: {end['error']}", f"logs: {attempt.logs}"]
    report = read_json(attempt.error(rank))
    log = attempt.log(rank)
    if report is None:
        phase = f" ({end['phase']})" if end.get("phase") else ""
        place = f" in step {end['step']}{phase}" if end.get("step") is not None else ""
        return [f"failed: rank {rank}{place}: {end['error']}", *indented(log_tail(log, LOG_LINES)), f"log: {log}"]
    place = f"in step {report['step']} ({report['phase']})"
    trace = str(report.get("traceback", "")).rstrip().splitlines()[-TRACEBACK_LINES:]
    return [f"failed: rank {rank} {place}: {report['error']}", *indented(trace), f"log: {log}"]


def indented(lines: list[str]) -> list[str]:
    return [f"  | {line}" for line in lines]


def results(status: Status) -> list[str]:
    """First and last mean reward; greedy accuracy before and after, one line a set."""
    lines = []
    rewards = status.rewards()
    if rewards:
        first, last = rewards[:FIRST], rewards[-RECENT:]
        lines.append(
            f"mean reward:     {mean(first):.3f} (first {len(first)} steps) -> {mean(last):.3f} (last {len(last)})"
        )
    for name, (before, after) in sorted(status.accuracies().items()):
        trained = f" -> {after:.3f}" if len(status.evaluations) > 1 else " before training"
        lines.append(f"greedy accuracy: {before:.3f}{trained} on {name}")
    return lines
