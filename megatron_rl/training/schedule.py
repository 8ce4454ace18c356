"""The one place where micro-batches go through the model, all of it or one stage of a pipeline.

The schedule of a pipeline is one forward, one backward (arXiv 2104.04473, section 2.2.1): a stage begins as many
micro-batches as there are stages behind it, and from then on finishes one for every one that it begins, so that it
never holds the activations of more. What stands idle is (stages - 1) / (stages - 1 + micro-batches) of the pass.

Where ranks wait for one another within a pass, stages of a pipeline or parts of a layer, none of them may leave it by
itself: `stop` is for ranks that nobody waits for. The others end the pass, and agree behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.algorithms.context import ContextPart, context_part
from megatron_rl.algorithms.packing import MicroBatch
from megatron_rl.model.policy import Policy
from megatron_rl.platform.attention import Layout
from megatron_rl.training.context import ContextLayout
from megatron_rl.training.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class ModelInput:
    """What a rank's part of the model reads of a micro-batch: all of its tokens, or those that this context-parallel
    rank works on. It lies on the model's device."""

    tokens: Tensor
    """[part]"""
    positions: Tensor
    """[part] within their sequence."""
    select: Tensor
    """[selected] the token of the part whose logits predict each of the trained ones that are predicted here."""
    targets: Tensor
    """[selected] those."""
    trained: Tensor
    """[selected] which of the batch's trained tokens they are: see `MicroBatch.trained`."""
    layout: Layout

    @classmethod
    def of(cls, policy: Policy, batch: MicroBatch, context: dist.ProcessGroup | None = None) -> ModelInput:
        """context: the ranks that share out the tokens; None where this one has all."""
        part: MicroBatch | ContextPart = batch
        if context is None or context.size() == 1:
            layout = policy.layout(batch)
        else:
            part = context_part(batch, context.rank(), context.size())
            of_part = policy.layout(part.whole, part.places)
            layout = ContextLayout(of_part, part.places_of_ranks.to(policy.device), context)
        names = ("tokens", "positions", "select", "targets", "trained")
        return cls(layout=layout, **{name: getattr(part, name).to(policy.device) for name in names})


def forward_backward(
    policy: Policy,
    inputs: Sequence[ModelInput],
    loss: Callable[[Tensor, ModelInput], Tensor],
    pipeline: Pipeline,
    *,
    stop: Callable[[], bool],
) -> None:
    """Add the gradients of the micro-batches' losses to the model's.

    Args:
        inputs: of the same micro-batches on all ranks of a replica, and as many on every replica; see
            `MicroBatch.empty`.
        loss: of [selected, hidden], what the last stage's output layer makes logits of, and their input: a scalar with
            gradient. Called on the last stage alone.
        pipeline: that the policy is a stage of.
        stop: asked before every micro-batch; True leaves out the rest.
    """
    under_way: deque[tuple[Tensor | None, Tensor]] = deque()  # what was received, and what was made of it
    for each in inputs:
        if stop():
            break
        received, made = _forward(policy, each, pipeline)
        if pipeline.last:
            made = loss(policy.predictors(made, each.select), each)
        else:
            pipeline.send_forward(made.detach())
        under_way.append((received, made))
        if len(under_way) > pipeline.behind:
            _backward(*under_way.popleft(), pipeline)
    while under_way:
        _backward(*under_way.popleft(), pipeline)
    pipeline.flush()


def forward(
    policy: Policy,
    inputs: Sequence[ModelInput],
    receive: Callable[[Tensor, ModelInput], None],
    pipeline: Pipeline,
    *,
    stop: Callable[[], bool],
) -> None:
    """Hand to `receive` what `forward_backward` hands to `loss`, without gradients. The other arguments as there."""
    with torch.no_grad():
        for each in inputs:
            if stop():
                break
            _, made = _forward(policy, each, pipeline)
            if pipeline.last:
                receive(policy.predictors(made, each.select), each)
            else:
                pipeline.send_forward(made)
    pipeline.flush()


def _forward(policy: Policy, each: ModelInput, pipeline: Pipeline) -> tuple[Tensor | None, Tensor]:
    """What this stage received and what it made of it."""
    shape, dtype = policy.hidden_shape(len(each.tokens)), policy.config.params_dtype
    received = pipeline.receive_forward(partial(torch.empty, shape, dtype=dtype, device=policy.device))
    if received is not None:
        received.requires_grad_(torch.is_grad_enabled())
    return received, policy.hidden(each.tokens, each.positions, each.layout, received)


def _backward(received: Tensor | None, made: Tensor, pipeline: Pipeline) -> None:
    made.backward(pipeline.receive_backward(made))
    if received is not None:
        assert received.grad is not None
        pipeline.send_backward(received.grad)
