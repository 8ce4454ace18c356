"""A rank's place in the pipeline of its replica, and what passes between its stages.

Hidden states go one way and their gradients the other, each over a group of its own: within one they are received in
the order in which they were sent, so no stage waits for another that waits for it. Nothing but tensors is sent: every
stage has the micro-batches themselves, and knows by them what it will receive.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.rank.groups import Groups


class Pipeline:
    """The neighbours of one rank. Where there is one stage it is the first and the last."""

    def __init__(self, groups: Groups | None = None) -> None:
        """groups: of the rank; None of one that is alone."""
        stages = groups.pipeline.size() if groups else 1
        stage = groups.pipeline.rank() if groups else 0
        self.first = stage == 0
        self.last = stage == stages - 1
        self.behind = stages - 1 - stage
        """Stages that follow this one."""
        self._groups = groups
        self._ranks = dist.get_process_group_ranks(groups.pipeline) if groups else [0]
        self._stage = stage
        self._sent: dict[dist.ProcessGroup, tuple[dist.Work, Tensor]] = {}

    def send_forward(self, hidden: Tensor) -> None:
        """Give the next stage what this one has made."""
        assert self._groups is not None
        self._send(hidden, self._stage + 1, self._groups.pipeline)

    def receive_forward(self, empty: Callable[[], Tensor]) -> Tensor | None:
        """What the stage before has made; None on the first.

        empty: makes the tensor that is filled.
        """
        if self.first:
            return None
        assert self._groups is not None
        return self._receive(empty(), self._stage - 1, self._groups.pipeline)

    def send_backward(self, gradient: Tensor) -> None:
        """Give the stage before the gradient of what it has made."""
        assert self._groups is not None
        self._send(gradient, self._stage - 1, self._groups.model)

    def receive_backward(self, made: Tensor) -> Tensor | None:
        """The gradient of what this stage has made; None on the last, whose losses have it."""
        if self.last:
            return None
        assert self._groups is not None
        return self._receive(torch.empty_like(made), self._stage + 1, self._groups.model)

    def flush(self) -> None:
        """Wait until all that was sent is received."""
        while self._sent:
            self._sent.popitem()[1][0].wait()

    def _send(self, tensor: Tensor, stage: int, group: dist.ProcessGroup) -> None:
        """Send without waiting; what was sent before has been received by then, as a rule, and is let go."""
        if group in self._sent:
            self._sent.pop(group)[0].wait()
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self._ranks[stage], group=group)
        assert work is not None
        self._sent[group] = work, tensor

    def _receive(self, tensor: Tensor, stage: int, group: dist.ProcessGroup) -> Tensor:
        dist.recv(tensor, self._ranks[stage], group=group)
        return tensor
