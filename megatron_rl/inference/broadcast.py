"""From the first rank of an engine replica to the others: what all of them execute next."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Plan = TypeVar("Plan")
"""What an engine sends, of frozen dataclasses and built-in types."""

INLINE = 1024
"""Bytes of the first message, which holds the plan of a decoding step whole; prompts follow in a second one."""
_LENGTH = 4
"""Bytes of it that say how long the plan is."""


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A tensor follows: one of new weights."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class PlanBroadcast(Generic[Plan]):
    """Broadcasts plans over gloo, so that no device waits. Both ends only wait as long as the group's time-out."""

    def __init__(self, control: dist.ProcessGroup) -> None:
        """control: ranks of one replica, whose first one sends."""
        self._control = control

    def send(self, plan: Plan | TensorPlan | None) -> None:
        """A plan for all to execute; None is the end of a phase."""
        content = pickle.dumps(plan, pickle.HIGHEST_PROTOCOL)
        message = len(content).to_bytes(_LENGTH, "little") + content
        first = message[:INLINE].ljust(INLINE, b"\0")
        self._broadcast(bytearray(first))
        if len(message) > INLINE:
            self._broadcast(bytearray(message[INLINE:]))

    def receive(self) -> Plan | TensorPlan | None:
        """What the first rank sends next."""
        first = bytes(self._broadcast(bytearray(INLINE)))
        length = _LENGTH + int.from_bytes(first[:_LENGTH], "little")
        rest = bytes(self._broadcast(bytearray(length - INLINE))) if length > INLINE else b""
        # Of the first rank of this replica, over the group by which torch's own object collectives are trusted too.
        plan: Plan | TensorPlan | None = pickle.loads((first + rest)[_LENGTH:length])
        return plan

    def send_tensor(self, name: str, tensor: Tensor) -> None:
        """A tensor for all to put into their parts of the model."""
        self.send(TensorPlan(name, tuple(tensor.shape), tensor.dtype))
        dist.broadcast(_bytes(tensor.cpu().contiguous()), group=self._control, group_src=0)

    def receive_tensor(self, plan: TensorPlan) -> Tensor:
        """The tensor that the plan announced, on the CPU."""
        tensor = torch.empty(plan.shape, dtype=plan.dtype)
        dist.broadcast(_bytes(tensor), group=self._control, group_src=0)
        return tensor

    def _broadcast(self, content: bytearray) -> bytearray:
        dist.broadcast(torch.frombuffer(content, dtype=torch.uint8), group=self._control, group_src=0)
        return content


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory, [bytes]: gloo does not know all types."""
    return tensor.reshape(-1).view(torch.uint8)
