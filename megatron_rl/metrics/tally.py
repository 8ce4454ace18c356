"""Sums, maxima and minima of one step, reduced over the ranks in one collective."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import torch
import torch.distributed as dist
from torch import Tensor


class Reduction(Enum):
    SUM = "sum"
    MAX = "max"
    MIN = "min"


class Tally:
    """Named scalars. Every rank must put the same names in the same order."""

    def __init__(self) -> None:
        self._values: dict[str, float | Tensor] = {}
        self._reductions: dict[str, Reduction] = {}

    def put(self, name: str, reduction: Reduction, value: float | Tensor) -> None:
        self._values[name] = value
        self._reductions[name] = reduction

    def add(self, name: str, value: float | Tensor) -> None:
        """Put a value that is summed over the ranks."""
        self.put(name, Reduction.SUM, value)

    def reduce(self, control: dist.ProcessGroup) -> Mapping[str, float]:
        """Return the values over all ranks of the gloo group `control`, in fp64. One all-gather: every rank sums in
        rank order, so that all ranks see the same bits."""
        mine = torch.tensor(self._floats(), dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(control))]
        dist.all_gather(rows, mine, group=control)
        table = torch.stack(rows)
        over_ranks = {
            Reduction.SUM: table.sum(0).tolist(),
            Reduction.MAX: table.amax(0).tolist(),
            Reduction.MIN: table.amin(0).tolist(),
        }
        return {name: over_ranks[reduction][i] for i, (name, reduction) in enumerate(self._reductions.items())}

    def _floats(self) -> list[float]:
        """Values on the host. Tensors of a device come in a single transfer."""
        tensors = [value for value in self._values.values() if isinstance(value, Tensor)]
        on_host = iter(torch.stack(tensors).tolist() if tensors else [])
        return [next(on_host) if isinstance(value, Tensor) else float(value) for value in self._values.values()]
