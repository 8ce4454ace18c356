"""The forward and backward passes of micro-batches, through a whole model or one pipeline stage.

The pipeline schedule is one forward, one backward (arXiv 2104.04473, section 2.2.1): a stage starts one
micro-batch for each stage behind it, and then finishes one for each further one it starts, so that it holds the
activations of no more. The idle share of a pass is (stages - 1) / (stages - 1 + micro-batches).

Ranks that wait for one another within a pass, as pipeline stages and tensor-parallel ranks do, cannot leave it alone:
`stop` is for ranks that nobody waits for. The others finish the pass and agree afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.algorithms.context import ContextPart
from megatron_rl.algorithms.packing import MicroBatch
from megatron_rl.learn.training.ahead import AheadInput
from megatron_rl.learn.training.context_layout import part_of
from megatron_rl.learn.training.router_replays import RouterReplays
from megatron_rl.model.platform.attention import Layout
from megatron_rl.model.policy import Policy
from megatron_rl.model.router import Replay
from megatron_rl.rank.groups import Groups


class Pipeline:
    """The neighbours of one rank. A single stage is both the first and the last.

    Hidden states and their gradients use separate groups. Each receives in the order of sending, so stages never wait
    for each other in a circle. Only tensors are sent: every stage has the micro-batches and so knows the shapes.
    """

    def __init__(self, groups: Groups | None = None) -> None:
        stages = groups.pipeline.size() if groups else 1
        stage = groups.pipeline.rank() if groups else 0
        self.first = stage == 0
        self.last = stage == stages - 1
        self.behind = stages - 1 - stage  # stages that follow this one
        self._groups = groups
        self._ranks = dist.get_process_group_ranks(groups.pipeline) if groups else [0]
        self._stage = stage
        self._sent: dict[tuple[dist.ProcessGroup, int], tuple[dist.Work, Tensor]] = {}

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

    def from_first(self, make: Callable[[], Tensor], empty: Callable[[], Tensor]) -> Tensor | None:
        """Return on the last stage what the first one makes; None on the others. Before its hidden states in each
        micro-batch, so that two neighbours send and receive in one order. empty: creates the tensor to fill."""
        if self.first:
            made = make()
            if self.last:
                return made
            assert self._groups is not None
            self._send(made, self._stage + self.behind, self._groups.pipeline)
        elif self.last:
            assert self._groups is not None
            return self._receive(empty(), 0, self._groups.pipeline)
        return None

    def flush(self) -> None:
        """Wait until all sent tensors are received."""
        while self._sent:
            self._sent.popitem()[1][0].wait()

    def _send(self, tensor: Tensor, stage: int, group: dist.ProcessGroup) -> None:
        """Send without waiting, except for the previous send to that stage, which is usually complete."""
        if (group, stage) in self._sent:
            self._sent.pop((group, stage))[0].wait()
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self._ranks[stage], group=group)
        assert work is not None
        self._sent[group, stage] = work, tensor

    def _receive(self, tensor: Tensor, stage: int, group: dist.ProcessGroup) -> Tensor:
        dist.recv(tensor, self._ranks[stage], group=group)
        return tensor


@dataclass(frozen=True, slots=True)
class ModelInput:
    """A micro-batch as a rank's part of the model reads it: all tokens, or the part of a context-parallel rank. On the
    model's device."""

    tokens: Tensor  # [part]
    positions: Tensor
    select: Tensor  # [selected] indices into the part: tokens whose logits predict a trained token
    targets: Tensor  # [selected] the predicted tokens
    trained: Tensor  # [selected] indices of the targets among the batch's trained tokens: see `MicroBatch.trained`
    layout: Layout
    replay: Replay | None = None
    ahead: AheadInput | None = None  # what the prediction layer reads, if it is trained

    @classmethod
    def of(
        cls,
        policy: Policy,
        batch: MicroBatch,
        context: dist.ProcessGroup | None = None,
        replays: RouterReplays | None = None,
    ) -> ModelInput:
        """context: ranks that share the tokens; None if this rank has all. replays: None: the routers choose."""
        part, layout = part_of(policy, batch, context)
        indices = part.indices if isinstance(part, ContextPart) else None
        names = ("tokens", "positions", "select", "targets", "trained")
        replay = None if replays is None else replays.of(batch, indices)
        ahead = AheadInput.of(policy, batch, context) if policy.model_config.trains_prediction else None
        of_part = {name: getattr(part, name).to(policy.device) for name in names}
        return cls(layout=layout, replay=replay, ahead=ahead, **of_part)


@dataclass(frozen=True, slots=True)
class UpdateInput:
    inputs: Sequence[ModelInput]  # equally many on every rank
    per_sequence: Tensor  # [2, sequences] weight of each token of the sequence in the global mean, and its advantage


def forward_backward(
    policy: Policy,
    inputs: Sequence[ModelInput],
    loss: Callable[[Tensor, ModelInput], Tensor],
    pipeline: Pipeline,
    *,
    stop: Callable[[], bool],
    partial_sums: Callable[[], AbstractContextManager[None]] = nullcontext,
    loss_ahead: Callable[[Tensor, AheadInput], Tensor] | None = None,
) -> None:
    """Add the gradients of the micro-batches' losses to the model's.

    Args:
        inputs: the same micro-batches on all ranks of a replica, and equally many on every replica (see
            `MicroBatch.empty`).
        loss: scalar with gradient of the predictors [selected, hidden], which the output layer turns into logits, and
            their input. Called only on the last stage.
        stop: called before every micro-batch; True skips the rest.
        partial_sums: context of all backward passes but the last, see `Overlap.partial`.
        loss_ahead: the same as `loss` of the prediction layer, added to it; None: that layer does not run.
    """
    left = len(inputs)

    def backward(received: Tensor | None, output: Tensor) -> None:
        nonlocal left
        left -= 1
        with partial_sums() if left else nullcontext():
            _backward(received, output, pipeline)

    # A stage starts one micro-batch for each stage that follows it, and one more, before it waits for a gradient.
    # Example: three stages and four micro-batches, F forward, B backward:
    #
    #     stage 0    F0 F1 F2 B0 F3 B1 B2 B3
    #     stage 1    F0 F1 B0 F2 B1 F3 B2 B3
    #     stage 2    F0 B0 F1 B1 F2 B2 F3 B3
    #
    # So stage 0 holds the activations of three micro-batches, however many there are.
    started: deque[tuple[Tensor | None, Tensor]] = deque()  # input and output of this stage
    for number, each in enumerate(inputs):
        if stop():
            break
        policy.begin_microbatch(number)
        next_tokens = _next_tokens(policy, each, pipeline) if loss_ahead else None
        received, output = _forward(policy, each, pipeline)
        if pipeline.last:
            of_policy = loss(policy.predictors(output, each.select), each)
            if loss_ahead and each.ahead and next_tokens is not None:
                ahead = each.ahead.predictors(policy, next_tokens, output.detach(), len(each.tokens))
                of_policy = of_policy + loss_ahead(ahead, each.ahead)
            output = of_policy
        else:
            pipeline.send_forward(output.detach())
        started.append((received, output))
        if len(started) > pipeline.behind:
            backward(*started.popleft())
    while started:
        backward(*started.popleft())
    pipeline.flush()


def forward(
    policy: Policy,
    inputs: Sequence[ModelInput],
    receive: Callable[[Tensor, ModelInput], None],
    pipeline: Pipeline,
    *,
    stop: Callable[[], bool],
) -> None:
    """Pass to `receive` what `forward_backward` passes to `loss`, without gradients. Other arguments as there."""
    with torch.no_grad():
        for each in inputs:
            if stop():
                break
            _, output = _forward(policy, each, pipeline)
            if pipeline.last:
                receive(policy.predictors(output, each.select), each)
            else:
                pipeline.send_forward(output)
    pipeline.flush()


def _next_tokens(policy: Policy, each: ModelInput, pipeline: Pipeline) -> Tensor | None:
    """Return on the last stage the embeddings that the prediction layer reads, from the first stage, which has the
    embedding. Without a gradient."""
    assert each.ahead is not None
    shape, dtype = policy.hidden_shape(len(each.ahead.tokens)), policy.config.params_dtype
    with torch.no_grad():
        make = partial(policy.embedded, each.ahead.tokens, each.ahead.positions)
        return pipeline.from_first(make, partial(torch.empty, shape, dtype=dtype, device=policy.device))


def _forward(policy: Policy, each: ModelInput, pipeline: Pipeline) -> tuple[Tensor | None, Tensor]:
    shape, dtype = policy.hidden_shape(len(each.tokens)), policy.config.params_dtype
    received = pipeline.receive_forward(partial(torch.empty, shape, dtype=dtype, device=policy.device))
    if received is not None:
        received.requires_grad_(torch.is_grad_enabled())
    return received, policy.hidden(each.tokens, each.positions, each.layout, received, replay=each.replay)


def _backward(received: Tensor | None, output: Tensor, pipeline: Pipeline) -> None:
    output.backward(pipeline.receive_backward(output))
    if received is not None:
        assert received.grad is not None
        pipeline.send_backward(received.grad)
