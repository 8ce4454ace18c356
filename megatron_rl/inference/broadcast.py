"""From the first rank of an engine replica to the others: what all of them execute next."""

from __future__ import annotations

import pickle

import torch
import torch.distributed as dist

from megatron_rl.inference.plans import StepPlan

INLINE = 1024
"""Bytes of the first message, which holds the plan of a decoding step whole; prompts follow in a second one."""
_LENGTH = 4
"""Bytes of it that say how long the plan is."""


class PlanBroadcast:
    """Broadcasts plans over gloo, so that no device waits. Both ends only wait as long as the group's time-out."""

    def __init__(self, control: dist.ProcessGroup) -> None:
        """control: ranks of one replica, whose first one sends."""
        self._control = control

    def send(self, plan: StepPlan | None) -> None:
        """A plan for all to execute; None is the end of a phase."""
        content = pickle.dumps(plan, pickle.HIGHEST_PROTOCOL)
        message = len(content).to_bytes(_LENGTH, "little") + content
        first = message[:INLINE].ljust(INLINE, b"\0")
        self._broadcast(bytearray(first))
        if len(message) > INLINE:
            self._broadcast(bytearray(message[INLINE:]))

    def receive(self) -> StepPlan | None:
        """What the first rank sends next."""
        first = bytes(self._broadcast(bytearray(INLINE)))
        length = _LENGTH + int.from_bytes(first[:_LENGTH], "little")
        rest = bytes(self._broadcast(bytearray(length - INLINE))) if length > INLINE else b""
        # Of the first rank of this replica, over the group by which torch's own object collectives are trusted too.
        plan: StepPlan | None = pickle.loads((first + rest)[_LENGTH:length])
        return plan

    def _broadcast(self, content: bytearray) -> bytearray:
        dist.broadcast(torch.frombuffer(content, dtype=torch.uint8), group=self._control, group_src=0)
        return content
