"""The prediction layer in training: its input, its predictors and its loss.

No gradient leaves the layer: what it reads of the model and of the embedding is detached, and so is the output layer.
The policy's gradient is therefore that of its own loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from megatron_rl.algorithms.context import ContextPart, cut
from megatron_rl.algorithms.logprobs import predicted_logprobs
from megatron_rl.algorithms.loss import prediction_loss
from megatron_rl.algorithms.packed_ahead import ahead_of
from megatron_rl.algorithms.packing import MicroBatch
from megatron_rl.learn.training.context_layout import part_of
from megatron_rl.model.platform.attention import Layout
from megatron_rl.model.policy import Policy
from megatron_rl.rank.metrics.stats import LossStats


@dataclass(frozen=True, slots=True)
class AheadInput:
    """A micro-batch, or the part of a context-parallel rank, as the prediction layer reads it: see `AheadBatch`. On the
    model's device."""

    tokens: Tensor  # [part]
    positions: Tensor
    select: Tensor  # [selected] indices into the part: tokens behind which the layer predicts a trained token
    targets: Tensor  # [selected]
    trained: Tensor  # [selected] as in `ModelInput`
    layout: Layout
    before: Tensor  # [part] row of the token before each, in the outputs of all context-parallel ranks one by one
    context: dist.ProcessGroup | None  # ranks that share the tokens; None if this rank has all

    @classmethod
    def of(cls, policy: Policy, batch: MicroBatch, context: dist.ProcessGroup | None) -> AheadInput:
        """context: as for `ModelInput.of`."""
        ahead = ahead_of(batch)
        part, layout = part_of(policy, ahead.batch, context)
        before = ahead.before
        if isinstance(part, ContextPart) and context is not None:
            before = pad(before, (0, part.indices_of_ranks.numel() - len(before)))[part.indices]
            before = _rows_of_ranks(batch, context)[before]
        else:
            context = None
        names = ("tokens", "positions", "select", "targets", "trained")
        of_part = {name: getattr(part, name).to(policy.device) for name in names}
        return cls(layout=layout, before=before.to(policy.device), context=context, **of_part)

    def predictors(self, policy: Policy, next_tokens: Tensor, hidden: Tensor, count: int) -> Tensor:
        """Run the layer, and select [selected, hidden] as `Policy.predictors`. Collective over the ranks that share a
        micro-batch.

        Args:
            next_tokens: embeddings of the tokens, `Policy.hidden_shape`.
            hidden: the model's output, in which this rank has the rows of its part of the micro-batch. No gradient.
            count: number of these rows without padding.
        """
        layer = policy.prediction
        assert layer is not None
        with torch.no_grad():
            rows = policy.whole(hidden)[:count]
            if self.context is not None:
                of_ranks = rows.new_empty((self.context.size() * count, *rows.shape[1:]))
                dist.all_gather_into_tensor(of_ranks, rows.contiguous(), group=self.context)
                rows = of_ranks
            behind = policy.part(rows.index_select(0, self.before))
        out = layer(next_tokens, behind, policy.rotations.at(self.positions), self.layout)
        return policy.predictors(out, self.select)


def _rows_of_ranks(batch: MicroBatch, context: dist.ProcessGroup) -> Tensor:
    """Row of each packed token in the outputs of all context-parallel ranks, one rank after another, [padded]."""
    ranks = context.size()
    missing = -len(batch.tokens) % ranks
    ends = batch.cu_seqlens[-1] + torch.arange(1, missing + 1, dtype=torch.int32)  # as `context_part` pads
    held = cut(torch.cat((batch.cu_seqlens, ends)), ranks).flatten()
    return torch.empty_like(held).scatter_(0, held, torch.arange(len(held)))


def loss_ahead(
    policy: Policy, weights_of: Callable[[Tensor], Tensor], losses: list[LossStats]
) -> Callable[[Tensor, AheadInput], Tensor] | None:
    """Return the loss of a micro-batch as `forward_backward` calls it; None if the prediction layer is not trained. It
    adds its statistics to the last of `losses`.

    weights_of: weights in the global mean of some trained tokens, by their indices.
    """
    if not policy.model_config.trains_prediction:
        return None
    coefficient = policy.model_config.prediction_loss_coefficient

    def loss(hidden: Tensor, read: AheadInput) -> Tensor:
        output = policy.output()
        output = replace(output, weight=output.weight.detach())
        logprobs, _ = predicted_logprobs(hidden, output, read.targets, 1.0, entropy="none")
        value, found = prediction_loss(logprobs, weights_of(read.trained))
        losses[-1] = replace(losses[-1], **found)
        return coefficient * value

    return loss
