"""Lines printed after an attempt has ended. Reads the attempt's files and decides nothing."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from operator import itemgetter

from launcher.cli.show.history import RECENT, History, clock, mean, shown_accuracy
from launcher.cli.show.scores import lines as evaluation_lines
from launcher.cli.show.scores import result_of
from launcher.explain.record import GREEDY, accuracies, held_out_losses, sampled_shares
from launcher.host.judge.sentence import describe_end
from launcher.runs.failure import RunFailure, failure_of
from launcher.runs.state import result_file
from megatron_rl.contract.attempt_records import AttemptEnd
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

EXIT_CODES = {
    FINISHED: EXIT_FINISHED,
    DRAINED: EXIT_INTERRUPTED,
    STOPPED: EXIT_INTERRUPTED,
    CRASHED: EXIT_CRASHED,
    MISCONFIGURED: EXIT_USAGE,
}
FIRST = 10  # steps averaged for the first mean reward


def ending_lines(run: RunDir, attempt: Attempt, end: AttemptEnd, history: History, resume: str) -> list[str]:
    """Return lines about how an attempt ended, the results so far, and how to resume. `resume`: the command that
    resumes this run."""
    out = result_file(run)
    further = [f"resume:      {resume}"]
    if end.outcome == MISCONFIGURED:  # the next attempt would end in the same way
        further = [f"next:        {once_corrected(run, resume)}"]
    if end.outcome == FINISHED:
        further = []
        took = f", this attempt took {clock(end.seconds)}" if end.seconds is not None else ""
        lines = [f"finished: {history.step} steps{took}" if out is None else f"finished{took}"]
        lines += [f"stopped early:   {end.why}"] if end.why else []
    elif end.outcome in (DRAINED, STOPPED):
        lines = [describe_end(end, time.time())]
    else:
        lines = failure_lines(failure_of(attempt, end))
    if out is not None:
        result = result_of(run) if end.outcome == FINISHED else None
        lines += evaluation_lines(result, str(out)) if result else [f"files:       {run.root}"]
        return [*lines, *further]
    lines += result_lines(history)
    lines += [f"warning:         {warning}" for warning in history.warnings]
    lines += [
        f"files:       {run.root}",
        f"tensorboard: tensorboard --logdir {shlex.quote(str(run.tensorboard))}",
    ]
    return [*lines, *further]


def once_corrected(run: RunDir, resume: str) -> str:
    """Return how a run with a wrong configuration goes on. One that holds no work yet takes other values only from a
    recipe."""
    from launcher.job.admission import has_work  # slow to import, and most ends do not need it

    if not has_work(run) and not resume.startswith("mrl-submit"):
        resume = f"mrl-submit RECIPE --run-dir {shlex.quote(str(run.root))}"
    return f"correct it, then {resume}"


def failure_lines(failure: RunFailure) -> list[str]:
    what = "logs" if failure.log.is_dir() else "log"
    return [failure.message, *indented(failure.shown), f"{what}: {failure.log}"]


def indented(lines: Sequence[str]) -> list[str]:
    return [f"  | {line}" for line in lines]


def result_lines(history: History) -> list[str]:
    lines = []
    rewards = history.rewards
    if rewards:
        first, last = rewards[:FIRST], rewards[-RECENT:]
        lines.append(
            f"mean reward:     {mean(first):.3f} (first {len(first)} steps) -> {mean(last):.3f} (last {len(last)})"
        )
    for name, losses in sorted(held_out_losses(history.evaluations).items()):
        step, best = min(losses, key=itemgetter(1))
        now = f" -> {losses[-1][1]:.4f}, best {best:.4f} after step {step}" if len(losses) > 1 else " before training"
        lines.append(f"loss:            {losses[0][1]:.4f}{now} on {name}")
    for score in (GREEDY, *sampled_shares(history.evaluations)):
        for name, (before, after) in sorted(accuracies(history.evaluations, score).items()):
            trained = f" -> {shown_accuracy(after)}" if len(history.evaluations) > 1 else " before training"
            lines.append(f"{f'{score}:'.replace('_', ' '):<16} {shown_accuracy(before)}{trained} on {name}")
    return lines
