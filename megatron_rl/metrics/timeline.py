"""Clock of a rank that counts each second in exactly one category.

with timeline.phase("generate"):
    ...
    with timeline.phase("wait"):     # the inner phase counts these seconds, the outer one continues afterwards
        ...
timeline.tally(tally)                # seconds since the last call; the tally sums them over the ranks
record = timeline.line(total, ranks, step)  # for attempts/NNN/timeline.jsonl
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megatron_rl.contract.attempt_records import TimelineLine

if TYPE_CHECKING:  # the tally imports torch, and the clock starts before torch is imported
    from megatron_rl.metrics.stats import Tally

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
    """Clock of one rank. Reads the wall clock once, to order attempts and hosts, and measures durations with a
    monotonic clock."""

    def __init__(self, category: str = "start-up") -> None:
        self.began = time.time()
        self._since = time.perf_counter()
        self._offset = self.began - self._since
        self._category = category
        self._seconds = dict.fromkeys(CATEGORIES, 0.0)
        self._first = True

    @contextmanager
    def phase(self, category: str) -> Iterator[None]:
        """Count the time of a `with` block in `category`."""
        outer = self.switch(category)
        try:
            yield
        finally:
            self.switch(outer)

    def switch(self, category: str) -> str:
        """Count in `category` from now on; return the previous category."""
        now = time.perf_counter()
        before = self._category
        self._seconds[before] += now - self._since
        self._category, self._since = category, now
        return before

    def move(self, source: str, target: str, seconds: float) -> None:
        """Count up to `seconds` of `source` in `target` instead."""
        moved = min(seconds, self._seconds[source])
        self._seconds[source] -= moved
        self._seconds[target] += moved

    def tally(self, tally: Tally) -> None:
        """Add the seconds since the last call to `tally`. Also adds the ranks' times of day: their mean makes the
        seconds of all ranks between two lines exactly the number of ranks times the difference."""
        self.switch(self._category)
        if self._first:
            tally.add("timeline/began", self.began)
        tally.add("timeline/at", self._since + self._offset)
        for name, seconds in self._seconds.items():
            tally.add(f"timeline/{name}", seconds)
            self._seconds[name] = 0.0

    def line(self, total: Mapping[str, float], ranks: int, step: int, resumed: int | None = None) -> TimelineLine:
        """Return the line of Attempt.timeline for a reduced tally. The first line also has the ranks' start.

        Args:
            ranks: number of ranks in the tally.
            resumed: step of the checkpoint that was loaded, for the line after the load.
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
