"""Clock of a rank that counts each second in exactly one category.

with timeline.phase("generate"):
    ...
    with timeline.phase("wait"):     # the inner phase counts these seconds, the outer one continues afterwards
        ...
timeline.tally(tally)                # seconds since the last call; the tally sums them over the ranks
record = timeline.line(tally.reduce(control), step)  # for attempts/NNN/timeline.jsonl

The line also names the slowest rank of each category in COMPARED. Ranks work side by side until they meet at a safe
point, or in a collective of the work itself. Seconds at a safe point are `wait`: a rank that is slow in anything
arrives last, and waits *least*. The other categories are a rank's own work, and its slowest rank has *most* seconds:

generate, reward   until the safe point at which the ranks agree on the batch. A rank with longer answers also takes
                   longer: one step proves nothing, the same rank in most steps does. A training rank whose answers
                   come from replicas or a server only waits for them: these two and `wait` have no meaning there
log-probs          passes over the rank's micro-batches, until its device has finished
train              the same until the safe point before the update. In the update all ranks leave their collectives
                   together, which adds equal seconds to all
offload            copies of the rank's own state
refit              the ranks that send weights work longest. Those that meet in its collectives leave together
save               copies of the rank's own part of a checkpoint, until a safe point

Ranks that meet within a pass (tensor, context and pipeline parallel ranks, and all ranks in the last micro-batch with
overlap_grad_reduce) end it together, so that the slow one is among those with most seconds. Start-up, load, evaluation
and drain end in collectives that count for them: the seconds of all ranks are equal there, even if one was slow.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megatron_rl.contract.attempt_records import SlowestRank, TimelineLine

if TYPE_CHECKING:  # the tally imports torch, and the clock starts before torch is imported
    from torch import Tensor

    from megatron_rl.rank.metrics.stats import Reduced, Tally

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
COMPARED = ("generate", "reward", "log-probs", "train", "offload", "refit", "save", "wait")
"""Categories whose seconds show which rank is slow."""


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
        """Put the seconds since the last call into `tally`. Also adds the ranks' times of day: their mean makes the
        seconds of all ranks between two lines exactly the number of ranks times the difference."""
        self.switch(self._category)
        if self._first:
            tally.add("timeline/began", self.began)
        tally.add("timeline/at", self._since + self._offset)
        for name, seconds in self._seconds.items():
            tally.add(f"timeline/{name}", seconds)
            if name in COMPARED:
                tally.compare(name, seconds)
            self._seconds[name] = 0.0

    def line(self, reduced: Reduced, step: int, resumed: int | None = None) -> TimelineLine:
        """Return the line of Attempt.timeline for a reduced tally. The first line also has the ranks' start. Only rank
        0 knows the slowest ranks.

        Args:
            resumed: step of the checkpoint that was loaded, for the line after the load.
        """
        first, self._first = self._first, False
        total, ranks, compared = reduced.total, reduced.ranks, reduced.compared
        seconds = {name: total[f"timeline/{name}"] for name in CATEGORIES if total[f"timeline/{name}"]}
        return TimelineLine(
            at=total["timeline/at"] / ranks,
            step=step,
            seconds=seconds,
            began=total["timeline/began"] / ranks if first else None,
            ranks=ranks if first else None,
            resumed=resumed,
            slowest={name: slowest(of_ranks, name) for name, of_ranks in compared.items() if name in seconds}
            if ranks > 1 and compared is not None
            else None,
        )


# Of four ranks that train 10, 10, 13 and 10 s until they meet, the third is slow. It waits 0 s for the others, and they
# wait 3 s for it: in `train` the slowest rank has most seconds, in `wait` it has least. It is compared with the median
# of the others, 10 s, so that a second slow rank does not hide how much is lost.
def slowest(seconds: Tensor, category: str) -> SlowestRank:
    """Return the slowest rank of a category, the lowest of several.

    seconds: [ranks] fp64, at least two.
    """
    ordered, ranks = seconds.sort(stable=True, descending=category != "wait")
    others = ordered[1:]
    middle = (others[(len(others) - 1) // 2] + others[len(others) // 2]) / 2
    return SlowestRank(int(ranks[0]), round(float(ordered[0]), 6), round(float(middle), 6))
