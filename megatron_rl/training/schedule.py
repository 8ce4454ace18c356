"""The one place where micro-batches go through the model: a pipeline schedule can own it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.algorithms.packing import MicroBatch
from megatron_rl.model.policy import Policy
from megatron_rl.platform.attention import Layout


@dataclass(frozen=True, slots=True)
class ModelInput:
    """A micro-batch on the model's device."""

    batch: MicroBatch
    layout: Layout

    @classmethod
    def of(cls, policy: Policy, batch: MicroBatch) -> ModelInput:
        return cls(batch.to(policy.device), policy.layout(batch))


def forward_backward(
    model: Any,
    inputs: Sequence[ModelInput],
    loss: Callable[[Tensor, MicroBatch], Tensor],
    *,
    stop: Callable[[], bool],
) -> None:
    """Add the gradients of the micro-batches' losses to the model's.

    Args:
        model: the policy, or DDP around it.
        inputs: as many on every rank; see `MicroBatch.empty`.
        loss: of logits [selected, vocab] and their micro-batch, a scalar with gradient.
        stop: asked before every micro-batch; True leaves out the rest. Here, where no rank waits for another in
            between, each may stop by itself.
    """
    _run(model, inputs, lambda logits, batch: loss(logits, batch).backward(), stop)


def forward(
    model: Any,
    inputs: Sequence[ModelInput],
    receive: Callable[[Tensor, MicroBatch], None],
    *,
    stop: Callable[[], bool],
) -> None:
    """Hand the micro-batches' logits to `receive`, without gradients. The other arguments as of `forward_backward`."""
    with torch.no_grad():
        _run(model, inputs, receive, stop)


def _run(
    model: Any, inputs: Sequence[ModelInput], use: Callable[[Tensor, MicroBatch], object], stop: Callable[[], bool]
) -> None:
    for each in inputs:
        if stop():
            return
        batch = each.batch
        use(model(batch.tokens, batch.positions, each.layout, batch.select), batch)
