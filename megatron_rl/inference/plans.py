"""What all ranks of a replica compute next, as its first one tells them."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.inference.config import Sampling

Plan = TypeVar("Plan")
"""What an engine sends, of frozen dataclasses and built-in types."""

INLINE = 1024
"""Bytes of the first message, which holds the plan of a decoding step whole; prompts follow in a second one."""
_LENGTH = 4
"""Bytes of it that say how long the plan is."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """Tokens of one sequence to compute, and the rows that go on from it; none where more of its tokens follow."""

    tokens: list[int]
    """From place `start` on."""
    start: int
    """Those before are in the cache."""
    pages: list[int]
    """Of the sequence from its first place on, as far as they are full."""
    samples: list[int]
    """One for each row ..."""
    own: list[int]
    """... and the page on which it goes on, with a copy of what fills no page."""
    answer_tokens: list[int]
    """What has been sampled already ..."""
    answer_logprobs: list[float]
    """... and its log-probs."""
    key: int
    sampling: Sampling
    top_logprobs: int = 0
    scored: list[int] = field(default_factory=list)
    """Tokens that follow the first ones of the piece in the prompt, if they are scored."""
    most_scored: int = 0
    """How many of the likeliest tokens are noted beside each of them."""
    penalized: list[int] = field(default_factory=list)
    """The prompt, where a repetition penalty looks at it."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass of the model. It says everything that a rank does not know from the plans before."""

    moves: list[tuple[int, int]]
    """(from, to): rows that change their place before anything else."""
    pages: list[tuple[int, int, int]]
    """(row, place, page): what rows get then, at which place of their pages."""
    rows: range
    """Those that get their next token."""
    prefills: list[Prefill]
    """What new rows begin with, in their order; empty where the rows are being decoded."""


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
