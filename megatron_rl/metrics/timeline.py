"""Where the seconds of a rank go: each belongs to exactly one category.

with timeline.phase("generate"):
    ...
    with timeline.phase("wait"):     # the inner one has these seconds, the outer one goes on afterwards
        ...
timeline.tally(tally)                # since the last time; the tally sums them over the ranks
record = timeline.line(total, ranks, step)  # for attempts/NNN/timeline.jsonl
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megatron_rl.contract.attempt_records import TimelineLine

if TYPE_CHECKING:  # it needs torch, and a clock runs before there is torch
    from megatron_rl.metrics.tally import Tally

CATEGORIES = (
    "start-up",
    "load",
    "generate",
    "reward",
    "log-probs",
    "train",
    "offload",
    "refit",
    "save",
    "evaluate",
    "wait",
    "drain",
)


class Timeline:
    """Clock of one rank, which never stands still. Wall-clock time, by which attempts and hosts are put in order, is
    read once; what passes is measured by a clock that nobody sets."""

    def __init__(self, category: str = "start-up") -> None:
        self.began = time.time()
        self._since = time.perf_counter()
        self._offset = self.began - self._since
        self._category = category
        self._seconds = dict.fromkeys(CATEGORIES, 0.0)
        self._first = True

    @contextmanager
    def phase(self, category: str) -> Iterator[None]:
        """Count the time of a `with` block under `category`."""
        outer = self.switch(category)
        try:
            yield
        finally:
            self.switch(outer)

    def switch(self, category: str) -> str:
        """Count from now on under `category`; returns the one that ends."""
        now = time.perf_counter()
        before = self._category
        self._seconds[before] += now - self._since
        self._category, self._since = category, now
        return before

    def move(self, source: str, target: str, seconds: float) -> None:
        """Count `seconds` of what stands under `source` under `target` instead."""
        moved = min(seconds, self._seconds[source])
        self._seconds[source] -= moved
        self._seconds[target] += moved

    def tally(self, tally: Tally) -> None:
        """Add what passed since the last call to `tally`. The mean of the ranks' times of day is taken too, so that
        the seconds of all ranks between two lines are their number times the difference, to the last digit."""
        self.switch(self._category)
        if self._first:
            tally.add("timeline/began", self.began)
        tally.add("timeline/at", self._since + self._offset)
        for name, seconds in self._seconds.items():
            tally.add(f"timeline/{name}", seconds)
            self._seconds[name] = 0.0

    def line(self, total: Mapping[str, float], ranks: int, step: int, resumed: int | None = None) -> TimelineLine:
        """The line of Attempt.timeline that the ranks' reduced tally makes. The first one also says when they began.

        Args:
            ranks: that were summed up.
            resumed: step of the checkpoint that was gone on from, in the line that follows the load.
        """
        first, self._first = self._first, False
        return TimelineLine(
            at=total["timeline/at"] / ranks,
            step=step,
            seconds={name: total[f"timeline/{name}"] for name in CATEGORIES if total[f"timeline/{name}"]},
            began=total["timeline/began"] / ranks if first else None,
            ranks=ranks if first else None,
            resumed=resumed,
        )
