"""The supervised loss of the learned tokens of a micro-batch."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.loss import loss_statistics
from megatron_rl.algorithms.trained_tokens import TrainedTokens
from megatron_rl.metrics.stats import LossStats


def supervised_loss(tokens: TrainedTokens) -> tuple[Tensor, LossStats]:
    """Return the weighted sum of the negative log-probs, -weight * log p(token): the cross-entropy of the rows.

    A token whose log-prob is not finite is left out and counted, as in `grpo_loss`.

    Returns:
        The loss, a scalar whose sum over micro-batches and ranks is the mean over the global batch, and its statistics.
    """
    carries_loss = tokens.weights != 0
    learned = carries_loss & tokens.logprobs.isfinite()
    loss = -(torch.where(learned, tokens.logprobs, 0.0) * torch.where(learned, tokens.weights, 0.0)).sum()
    none = torch.zeros_like(tokens.weights)
    per_token = {
        "tokens": learned,
        "nonfinite": carries_loss & ~learned,
        "entropy": torch.where(learned, tokens.entropy, 0.0),
        **dict.fromkeys(("ratio", "inference_difference"), none),
    }
    return loss, loss_statistics(loss.detach(), per_token)
