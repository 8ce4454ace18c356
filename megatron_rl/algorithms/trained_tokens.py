"""The trained tokens of a micro-batch: everything that a loss reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this magnitude: exp of more than 88 is infinite in fp32, and infinity times 0 is NaN."""


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """The trained tokens of one micro-batch, all sequences concatenated; every tensor is [tokens], and fp32 unless its
    line says otherwise.

    All log-probs are of softmax(logits / T), T the sampling temperature.
    """

    logprobs: Tensor
    """Log-probs of the policy in training, with gradient."""
    old_logprobs: Tensor
    """Log-probs at the weights before the step, or at those that sampled. On policy and before the first update they
    equal `logprobs.detach()`, so the ratio is exactly 1."""
    inference_logprobs: Tensor
    """Log-probs of the engine that sampled."""
    entropy: Tensor
    """Entropy in nats of the distributions the tokens were drawn from; with gradient if `grpo.entropy_coefficient` is
    above 0."""
    advantages: Tensor
    weights: Tensor
    """Each token's share of the global mean: see `reduction.token_weights`. 0 for tokens that carry no loss. A loss
    function sees finite values in all tensors of these tokens."""
    ref_logprobs: Tensor | None = None
    """Log-probs of the reference policy; None if `grpo.kl_beta` is 0."""
    answer_log_ratios: Tensor | None = None
    """Sum of the log ratios of the token's answer: see `loss_terms.answer_log_ratios`; needed if the level of
    `grpo.importance` or `grpo.rejection` is not token."""
    answer_tokens: Tensor | None = None
    """Number of the log ratios that were added."""
    divergences: Tensor | None = None
    """Divergences from the teacher's distributions, with gradient; None without `distill.divergence`."""
    sequence: Tensor | None = None
    """[tokens] int64, index of the token's sequence in 0..sequences-1."""
    sequences: int = 0
    """Number of sequences in the rank's part of the batch; some have no token here."""
    environment: Tensor | None = None
    """[tokens] int64, index of the environment whose answer has the token; None in a run with one environment."""
    environments: int = 0
    context: dist.ProcessGroup | None = None
    """Context-parallel ranks that have the other tokens of the same sequences; None if this rank has all tokens."""

    @classmethod
    def of_rows(cls, logprobs: Tensor, weights: Tensor) -> TrainedTokens:
        """Return tokens of rows of data, which no policy sampled and which have no advantage. Both are [tokens]."""
        known, none = logprobs.detach(), torch.zeros_like(weights)
        return cls(logprobs, known, known, entropy=none, advantages=none, weights=weights)

    @property
    def ratio(self) -> Tensor:
        """exp(logprobs - old_logprobs), with gradient."""
        return (self.logprobs - self.old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()

    def each(self, change: Callable[[Tensor], Tensor]) -> TrainedTokens:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        changed: dict[str, Any] = {name: change(one) for name, one in values.items() if isinstance(one, Tensor)}
        return replace(self, **changed)

    def sequence_sum(self, values: Tensor) -> Tensor:
        """Return, for each token, the sum of `values` [tokens] over the tokens of its sequence with a weight above 0,
        [tokens]. Differentiable. Collective over the context-parallel ranks, also in the backward pass."""
        assert self.sequence is not None, "these tokens do not say which sequence they belong to"
        # In fp64: the order of the additions on a GPU, and the split over ranks, then change no bit of the result.
        of_trained = torch.where(self.weights != 0, values, 0.0).double()
        sums = of_trained.new_zeros(self.sequences).index_add(0, self.sequence, of_trained)
        if self.context is not None and self.context.size() > 1:
            sums = _SumOverRanks.apply(sums, self.context)
        return sums[self.sequence].to(values.dtype)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Return, for each token, the mean of `values` [tokens] over the tokens of its sequence with a weight above 0,
        [tokens]; as `sequence_sum`."""
        return self.sequence_sum(values) / self.sequence_sum(torch.ones_like(self.weights)).clamp(min=1)


class _SumOverRanks(torch.autograd.Function):
    """Sum of a tensor over ranks. Each rank's loss depends on the sum, so the gradients of all ranks are added."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
