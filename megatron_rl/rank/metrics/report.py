"""The record of a step: statistics of all ranks, reduced and converted to metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from megatron_rl.contract.attempt_records import TimelineLine
from megatron_rl.rank.control import Control
from megatron_rl.rank.metrics.metric import StepReport
from megatron_rl.rank.metrics.names import PROMPT_TOO_LONG, TIMED, metrics_of
from megatron_rl.rank.metrics.stats import Tally
from megatron_rl.rank.metrics.timeline import Timeline
from megatron_rl.recipe.errors import ConfigurationError, TaskFailed

MOST_REASONS = 20
"""Reasons for lost answers in the line of a step. An error that quotes its answer is a separate reason for each."""
OTHER_REASONS = "other reasons"
ERROR_REASONS = 3  # reasons in the message of AllAnswersLost


class AllAnswersLost(TaskFailed):
    """No answer of a step could be scored: the environment is broken, and the run would train on nothing."""


def step_lines(report: StepReport, timeline: Timeline, control: Control) -> tuple[dict[str, Any], TimelineLine]:
    """Return the lines of a step for metrics.jsonl and the attempt's timeline, the same on every rank, except that only
    rank 0 knows the slowest ranks. Collective.

    report: statistics of this rank.

    Raises AllAnswersLost, or ConfigurationError if all prompts of the step are too long.
    """
    tally = Tally()
    report.stats.put(tally)
    timeline.tally(tally)
    with timeline.phase("wait"):
        reduced = tally.reduce(control)
    stats = report.stats.reduced(reduced.total)
    failures, dropped = _of_all_ranks(report, control) if stats.batch.failed or stats.batch.dropped else ({}, {})
    components = _components(report, control) if stats.batch.with_components else {}
    if not stats.batch.answers and {*dropped.values()} == {PROMPT_TOO_LONG}:
        raise ConfigurationError(
            f"the prompts {report.first_ordinal} to {report.next_ordinal - 1}, all of step {report.step}, are too "
            "long: with sampling.max_new_tokens they exceed training.sequence_length or model.max_position_embeddings"
        )
    if not stats.batch.answers and report.rows:
        raise ConfigurationError(
            f"no row of step {report.step} can be trained on: {Counter(dropped.values()).most_common(1)[0][0]}"
        )
    if not stats.batch.answers:
        reasons = Counter(failures).most_common(ERROR_REASONS)
        counts = ", ".join(f"{count} x {reason}" for reason, count in reasons)
        trace = _traceback_of(reasons[0][0], report, control) if reasons else ""
        raise AllAnswersLost(f"no answer of step {report.step} could be scored: {counts}", trace)
    line = timeline.line(reduced, report.step)
    seconds = {name: line.seconds.get(name, 0.0) / control.size for name in TIMED}
    of_all_ranks = replace(
        report,
        stats=stats,
        dropped=dropped,
        failures=failures,
        components=components,
        ranks=control.size,
        seconds=seconds,
    )
    return metrics_of(of_all_ranks), line


def _components(report: StepReport, control: Control) -> dict[str, tuple[float, int]]:
    """Reward components of all ranks. Collective; called only if there are any.

    All ranks of a replica count its answers, so sums and counts are multiples of the true ones, and the means are
    right.
    """
    found: dict[str, tuple[float, int]] = {}
    for of_rank in filter(None, control.gather(dict(report.components) or None)):
        for name, (total, answers) in of_rank.items():
            before, counted = found.get(name, (0.0, 0))
            found[name] = before + total, counted + answers
    return found


def _of_all_ranks(report: StepReport, control: Control) -> tuple[dict[str, int], dict[int, str]]:
    """Failures and dropped ordinals of all ranks. Collective; called only if there are any."""
    failures: Counter[str] = Counter()
    dropped: dict[int, str] = {}
    own = (dict(report.failures), dict(report.dropped)) if report.failures or report.dropped else None
    for of_rank in filter(None, control.gather(own)):
        failures.update(of_rank[0])
        dropped |= of_rank[1]
    return dict(sorted(_most_frequent(failures).items())), dict(sorted(dropped.items()))


def _traceback_of(reason: str, report: StepReport, control: Control) -> str:
    """Traceback of the task's code for a reason; empty if no rank has one. Collective."""
    of_ranks = control.gather(dict(report.tracebacks) or None)
    known = (trace for of_rank in filter(None, of_ranks) for kind, trace in of_rank.items() if reason.startswith(kind))
    return next((trace for trace in known if trace), "")


def _most_frequent(failures: Counter[str]) -> Counter[str]:
    most = Counter(dict(failures.most_common(MOST_REASONS)))
    if others := failures.total() - most.total():
        most[OTHER_REASONS] += others
    return most
