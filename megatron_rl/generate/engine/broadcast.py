"""Broadcast of plans from the first rank of a replica to the others."""

from __future__ import annotations

import pickle
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

Plan = TypeVar("Plan")

INLINE = 1024
"""Bytes of the first message. It holds the whole plan of a decoding step; the rest of a prompt needs a second one."""
_LENGTH = 4


class PlanBroadcast(Generic[Plan]):
    """Broadcasts plans over gloo, so that no device waits. The group's timeout bounds the wait of both ends."""

    def __init__(self, control: dist.ProcessGroup) -> None:
        self._control = control

    def send(self, plan: Plan | None) -> None:
        """Send a plan for all to execute; None ends a phase."""
        content = pickle.dumps(plan, pickle.HIGHEST_PROTOCOL)
        message = len(content).to_bytes(_LENGTH, "little") + content
        first = message[:INLINE].ljust(INLINE, b"\0")
        self._broadcast(bytearray(first))
        if len(message) > INLINE:
            self._broadcast(bytearray(message[INLINE:]))

    def receive(self) -> Plan | None:
        first = bytes(self._broadcast(bytearray(INLINE)))
        length = _LENGTH + int.from_bytes(first[:_LENGTH], "little")
        rest = bytes(self._broadcast(bytearray(length - INLINE))) if length > INLINE else b""
        # Unpickling trusts the first rank of this replica, as torch's object collectives over the same group do.
        plan: Plan | None = pickle.loads((first + rest)[_LENGTH:length])
        return plan

    def _broadcast(self, content: bytearray) -> bytearray:
        dist.broadcast(torch.frombuffer(content, dtype=torch.uint8), group=self._control, group_src=0)
        return content
