"""Sums of a timeline's seconds: written into some of its lines, so that a reader need not add up all of them."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_rl.contract.attempt_records import TimelineLine, TimeTotal

EVERY = 256  # lines from one total to the next: what a reader of the end adds up itself


def of_one_rank(seconds: Mapping[str, float], span: float, ranks: int) -> tuple[dict[str, float], float]:
    """Return how one rank spent a stretch of time: category -> seconds, and their sum, at most `span`.

    Args:
        seconds: of a line of the timeline, summed over the ranks.
        span: seconds that passed on the clock.
    """
    # 4 ranks that each trained for 6 s and generated for 3 s say {train: 24, generate: 12}, so recorded = 9. If 10 s
    # have passed on the clock, a line is missing, which had the other second; if only 8 s, clocks differ and each entry
    # shrinks by 8/9.
    recorded = sum(seconds.values()) / ranks
    known = min(span, recorded)
    return {name: its / ranks * (known / recorded) if recorded else 0.0 for name, its in seconds.items()}, known


class RunningTotal:
    """Total of the lines of one timeline, from its first line on."""

    def __init__(self, every: int = EVERY) -> None:
        self._every = every
        self._lines, self._ranks = 0, 1
        self._at = 0.0
        self._seconds: dict[str, float] = {}
        self._known = self._unknown = 0.0

    def add(self, line: TimelineLine) -> TimelineLine:
        """Return the next line, with the total up to it if it is the turn of one."""
        if self._lines == 0:
            if line.began is None:
                return line  # not the first line of a timeline, so what came before is not known
            self._ranks, self._at = line.ranks or 1, line.began
        at = max(self._at, line.at)
        passed, known = of_one_rank(line.seconds, at - self._at, self._ranks)
        for name, its in passed.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + its
        self._known += known
        self._unknown += at - self._at - known
        self._at = at
        self._lines += 1
        if self._lines % self._every or line.at < at:  # the total ends at `at`
            return line
        return line._replace(total=TimeTotal(dict(self._seconds), self._known, self._unknown))
