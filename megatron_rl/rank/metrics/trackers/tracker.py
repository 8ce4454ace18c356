"""Interface of trackers, and the loop that shows them the record.

    rank 0 -> metrics.jsonl, evaluations.jsonl -> follow -> Tracker -> its files or service

The record on the disk is the queue: training never waits for a tracker, and nothing piles up in memory. A tracker says
which steps it lacks and is sent those, so it has each step once, including steps that an earlier attempt could not send
and those that a fork has from its source.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_rl.contract.attempt_records import Outcome
from megatron_rl.contract.codes import FINISHED
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.records import if_readable, read
from megatron_rl.contract.run_records import Fork, TrackerRun
from megatron_rl.rank.metrics.trackers.record_rows import RecordReader, RecordRow, newest_evaluation
from megatron_rl.recipe.logs import LoggingConfig

POLL_S = 5.0


class TrackerRefused(Exception):
    """A tracker cannot be used; the message says why in one line."""


class Tracker(Protocol):
    """One run of a tracker. Methods may block, and raise what the tracker's package raises."""

    next_step: int
    """First step that it was lacking when it was opened."""
    whole_steps: bool
    """Whether it keeps the first values of a step, which must then include its evaluation."""

    def log(self, rows: Sequence[RecordRow]) -> None:
        """Show steps, in ascending order."""

    def finish(self, outcome: str | None) -> None:
        """Say how the attempt ended: FINISHED, DRAINED, or None for a crash."""


class ServiceTracker(Tracker, Protocol):
    """Tracker that knows the run by an id."""

    url: str | None
    """Address of the run, without credentials; None if it has none."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run, as a tracker opens it."""

    run: RunDir
    known: TrackerRun
    recipe: dict[str, Any]
    logging: LoggingConfig

    @property
    def name(self) -> str:
        return self.run.root.resolve().name

    @property
    def fork(self) -> dict[str, Any]:
        found = if_readable(read(Fork, self.run.fork))
        return {"fork": {"from": found.source, "step": found.step}} if found else {}


def follow(
    run: RunDir,
    attempt: Attempt,
    tracker: Tracker,
    over: threading.Event,
    evaluated: int | None = None,
    note: Callable[[int], object] = lambda _: None,
) -> None:
    """Show the record to a tracker until `over` reports that it is complete.

    Args:
        evaluated: step of the newest evaluation that the tracker has; None: it is not known.
        note: called with that step once the tracker has a newer one.
    """
    record = RecordReader(run, attempt, tracker.next_step, evaluated)
    outcome = None
    while True:
        ended = over.is_set()  # checked before reading the record, which is then complete
        if ended:
            left = if_readable(read(Outcome, attempt.outcome))
            outcome = left and left.outcome
        if rows := record.rows(complete=outcome == FINISHED or not tracker.whole_steps):
            tracker.log(rows)
            if (newest := newest_evaluation(rows)) is not None:
                note(newest)
        if ended:
            break
        over.wait(POLL_S)
    tracker.finish(outcome)
