"""Sums, maxima and minima of one step, reduced over the ranks in one collective."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist


class _Kind(Enum):
    SUM = 1
    MAX = 2
    MIN = 3


class Tally:
    """Collects scalars under names; every rank must use the same names in the same order."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._kinds: dict[str, _Kind] = {}

    def add(self, name: str, value: float | torch.Tensor) -> None:
        self._values[name] = self._values.get(name, 0.0) + value
        self._kinds[name] = _Kind.SUM

    def maximum(self, name: str, value: float | torch.Tensor) -> None:
        self._values[name] = max(self._values.get(name, float("-inf")), float(value))
        self._kinds[name] = _Kind.MAX

    def minimum(self, name: str, value: float | torch.Tensor) -> None:
        self._values[name] = min(self._values.get(name, float("inf")), float(value))
        self._kinds[name] = _Kind.MIN

    def reduce(self, control: dist.ProcessGroup) -> Mapping[str, float]:
        """The values over all ranks of the gloo group `control`, in fp64. One all-gather: every rank sums in rank
        order, so all ranks see the same bits."""
        mine = torch.tensor([float(value) for value in self._values.values()], dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(control))]
        dist.all_gather(rows, mine, group=control)
        table = torch.stack(rows)
        by_kind = {
            _Kind.SUM: table.sum(0).tolist(),
            _Kind.MAX: table.amax(0).tolist(),
            _Kind.MIN: table.amin(0).tolist(),
        }
        return {name: by_kind[kind][i] for i, (name, kind) in enumerate(self._kinds.items())}
