"""Rows of scale.py: the cost to one process of something that grows with the cluster or the run."""

from __future__ import annotations

import math
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one call to one rank or process."""

    cpu_s: float
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    what: str
    """Unit of the sizes, in the plural."""
    sizes: tuple[int, ...]
    target: int
    """Size for which the limits hold; larger than the measured ones, or one of them."""
    measure: Callable[[int], Cost]
    limit_s: float | None = None
    """Aim at the target. None: no aim for seconds."""
    limit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Fit:
    """cost = at_largest * (size / largest) ** exponent."""

    exponent: float
    at_target: float


def cpu_seconds(call: Callable[[], object], repeats: int = 3) -> float:
    """Least CPU time of the calls."""
    least = math.inf
    for _ in range(repeats):
        began = time.process_time()
        call()
        least = min(least, time.process_time() - began)
    return least


def peak_bytes(call: Callable[[], object]) -> int:
    """Most memory that Python objects of one call occupied together."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def fit(sizes: tuple[int, ...], costs: list[float], target: int) -> Fit:
    """Fit a power law to the larger half of the points, where what does not grow matters least, and extrapolate from
    the largest. A cost that falls counts as flat."""
    points = [(math.log(size), math.log(max(cost, 1e-9))) for size, cost in zip(sizes, costs, strict=True)]
    points = points[min(len(points) // 2, max(len(points) - 2, 0)) :]
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    exponent = max(slope, 0.0)
    return Fit(slope, costs[-1] * (target / sizes[-1]) ** exponent)
