"""A rank's stage in the pipeline of its replica, and the tensors sent between stages.

Hidden states and their gradients use separate groups. Each receives in the order of sending, so stages never wait for
each other in a circle. Only tensors are sent: every stage has the micro-batches and so knows the shapes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.rank.groups import Groups


class Pipeline:
    """The neighbours of one rank. A single stage is both the first and the last."""

    def __init__(self, groups: Groups | None = None) -> None:
        stages = groups.pipeline.size() if groups else 1
        stage = groups.pipeline.rank() if groups else 0
        self.first = stage == 0
        self.last = stage == stages - 1
        self.behind = stages - 1 - stage  # stages that follow this one
        self._groups = groups
        self._ranks = dist.get_process_group_ranks(groups.pipeline) if groups else [0]
        self._stage = stage
        self._sent: dict[dist.ProcessGroup, tuple[dist.Work, Tensor]] = {}

    def send_forward(self, hidden: Tensor) -> None:
        assert self._groups is not None
        self._send(hidden, self._stage + 1, self._groups.pipeline)

    def receive_forward(self, empty: Callable[[], Tensor]) -> Tensor | None:
        """Return the previous stage's output; None on the first stage. empty: creates the tensor to fill."""
        if self.first:
            return None
        assert self._groups is not None
        return self._receive(empty(), self._stage - 1, self._groups.pipeline)

    def send_backward(self, gradient: Tensor) -> None:
        assert self._groups is not None
        self._send(gradient, self._stage - 1, self._groups.model)

    def receive_backward(self, output: Tensor) -> Tensor | None:
        """Return the gradient of this stage's output; None on the last stage, where the loss provides it."""
        if self.last:
            return None
        assert self._groups is not None
        return self._receive(torch.empty_like(output), self._stage + 1, self._groups.model)

    def flush(self) -> None:
        """Wait until all sent tensors are received."""
        while self._sent:
            self._sent.popitem()[1][0].wait()

    def _send(self, tensor: Tensor, stage: int, group: dist.ProcessGroup) -> None:
        """Send without waiting, except for the previous send, which is usually complete."""
        if group in self._sent:
            self._sent.pop(group)[0].wait()
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self._ranks[stage], group=group)
        assert work is not None
        self._sent[group] = work, tensor

    def _receive(self, tensor: Tensor, stage: int, group: dist.ProcessGroup) -> Tensor:
        dist.recv(tensor, self._ranks[stage], group=group)
        return tensor
