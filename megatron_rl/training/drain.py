"""Leaving at a safe point: a signal only sets a flag, and all ranks agree before any of them acts on it."""

from __future__ import annotations

import signal
from types import FrameType

import torch
import torch.distributed as dist

DRAIN_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)


class Drain:
    """The flag. SIGINT is ignored: Ctrl-C is the launcher's to translate."""

    def __init__(self) -> None:
        self.requested = False

    def listen(self) -> None:
        for number in DRAIN_SIGNALS:
            signal.signal(number, self._request)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    def agreed(self, group: dist.ProcessGroup, device: torch.device) -> bool:
        """Whether any rank was asked to leave; the same answer on all of them. Collective."""
        flag = torch.tensor([self.requested], dtype=torch.int32, device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        return bool(flag.item())
