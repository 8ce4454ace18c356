"""Pure: curves of a page, with few points whatever the number of steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

BUCKETS = 400
"""Parts of a long curve; each keeps its minimum and its maximum. A chart is some 500 pixels wide."""
SMOOTHED_OVER = 25
"""A smoothed curve averages one of so many parts of a run."""
SHORTEST = 7
"""Steps that are averaged at least, in a run of four times as many."""
DIGITS = 5  # significant digits of a number in the page

Value = float | None


@dataclass(frozen=True, slots=True)
class Curve:
    label: str
    values: list[Value]


class Points(NamedTuple):
    steps: list[int]
    columns: list[list[Value]]


def downsample(steps: Sequence[int], columns: Sequence[Sequence[Value]], buckets: int = BUCKETS) -> Points:
    """Keep in each of `buckets` equal parts of the steps the first one, and those where a column is lowest and highest.

    Peaks stay visible this way, and each column keeps its own values: nothing is averaged. All steps stay where there
    are at most two per bucket.
    """
    count = len(steps)
    if count <= 2 * buckets:
        kept = list(range(count))
    else:
        chosen = {0, count - 1}
        for part in range(buckets):
            low, high = part * count // buckets, (part + 1) * count // buckets
            for column in columns:
                values = column[low:high]
                known = [value for value in values if value is not None]
                if known:
                    chosen |= {low + values.index(min(known)), low + values.index(max(known))}
        kept = sorted(chosen)
    return Points([steps[at] for at in kept], [[rounded(column[at]) for at in kept] for column in columns])


def smoothed(values: Sequence[Value]) -> list[Value]:
    """Mean of each value and its neighbours, over a window of a SMOOTHED_OVER-th of the run, in a short run of
    SHORTEST steps, cut at both ends. None before the first value and after the last one."""
    half = max(len(values) // (2 * SMOOTHED_OVER), min(SHORTEST, len(values) // 4) // 2)
    sums = [0.0, *accumulate(value or 0.0 for value in values)]
    counts = [0, *accumulate(value is not None for value in values)]
    found: list[Value] = [None] * len(values)
    there = [at for at, value in enumerate(values) if value is not None]
    if there:
        shown = slice(there[0], there[-1] + 1)
        means = zip(*_ends(sums, half, shown), *_ends(counts, half, shown), strict=True)
        found[shown] = [(high - low) / (to - since) if to > since else None for low, high, since, to in means]
    return found


def _ends(running: Sequence[float], half: int, shown: slice) -> tuple[list[float], list[float]]:
    """Return a running sum before and after the window of each value that is shown."""
    before = [running[0]] * half + [*running]
    after = [*running[half + 1 :]] + [running[-1]] * half
    return before[shown], after[shown]


def rounded(value: Value) -> Value:
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{DIGITS}g}")
