"""Broadcast of plans and tensors from the first rank of a replica to the others."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Plan = TypeVar("Plan")
"""Plan of one engine: frozen dataclasses and built-in types, which pickle."""

INLINE = 1024
"""Bytes of the first message. It holds the whole plan of a decoding step; the rest of a prompt needs a second one."""
_LENGTH = 4
"""Bytes at the start of the first message that give the length of the plan."""


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """Announces one tensor of new weights, which follows."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class PlanBroadcast(Generic[Plan]):
    """Broadcasts plans over gloo, so that no device waits. The group's timeout bounds the wait of both ends."""

    def __init__(self, control: dist.ProcessGroup) -> None:
        """control: ranks of one replica; the first one sends."""
        self._control = control

    def send(self, plan: Plan | TensorPlan | None) -> None:
        """Send a plan for all to execute; None ends a phase."""
        content = pickle.dumps(plan, pickle.HIGHEST_PROTOCOL)
        message = len(content).to_bytes(_LENGTH, "little") + content
        first = message[:INLINE].ljust(INLINE, b"\0")
        self._broadcast(bytearray(first))
        if len(message) > INLINE:
            self._broadcast(bytearray(message[INLINE:]))

    def receive(self) -> Plan | TensorPlan | None:
        """Return the next plan of the first rank."""
        first = bytes(self._broadcast(bytearray(INLINE)))
        length = _LENGTH + int.from_bytes(first[:_LENGTH], "little")
        rest = bytes(self._broadcast(bytearray(length - INLINE))) if length > INLINE else b""
        # Unpickling trusts the first rank of this replica, as torch's object collectives over the same group do.
        plan: Plan | TensorPlan | None = pickle.loads((first + rest)[_LENGTH:length])
        return plan

    def send_tensor(self, name: str, tensor: Tensor) -> None:
        """Send a tensor for all ranks to copy to their parts of the model."""
        self.send(TensorPlan(name, tuple(tensor.shape), tensor.dtype))
        dist.broadcast(_bytes(tensor.cpu().contiguous()), group=self._control, group_src=0)

    def receive_tensor(self, plan: TensorPlan) -> Tensor:
        """Return the tensor that the plan announces, on the CPU."""
        tensor = torch.empty(plan.shape, dtype=plan.dtype)
        dist.broadcast(_bytes(tensor), group=self._control, group_src=0)
        return tensor

    def _broadcast(self, content: bytearray) -> bytearray:
        dist.broadcast(torch.frombuffer(content, dtype=torch.uint8), group=self._control, group_src=0)
        return content


def _bytes(tensor: Tensor) -> Tensor:
    """View the same memory as bytes: gloo does not support all dtypes."""
    return tensor.reshape(-1).view(torch.uint8)
