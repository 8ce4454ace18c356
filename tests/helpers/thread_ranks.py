"""A stand-in for torch.distributed in tests whose ranks are threads."""

from __future__ import annotations

import threading
from typing import Any

import torch


class ThreadRanks:
    """Stand-in for torch.distributed. Each rank is a thread, and passes its number as the group."""

    ReduceOp = torch.distributed.ReduceOp

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=20)
        self._parts: list[torch.Tensor] = [torch.empty(0)] * ranks

    def all_reduce(self, tensor: torch.Tensor, op: Any, group: int) -> None:
        self._parts[group] = tensor.clone()
        self._barrier.wait()
        tensor.copy_(torch.stack(self._parts).amax(0))
        self._barrier.wait()
