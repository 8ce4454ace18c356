"""Clipped surrogate of PPO."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.config import GrpoConfig
from megatron_rl.algorithms.losses.token_loss import TokenLoss
from megatron_rl.algorithms.trained_tokens import TrainedTokens


def clip(tokens: TrainedTokens, config: GrpoConfig) -> TokenLoss:
    """Return the loss of PPO (arXiv 1707.06347) as GRPO uses it (arXiv 2402.03300), with separate lower and upper
    ranges (arXiv 2503.14476):

        L = -min(r A, clamp(r, 1 - eps_low, 1 + eps_high) A)    r = exp(log_prob - old)

    and with `dual_clip` c (arXiv 1912.09729), which bounds the loss of a token of negative advantage that
    has become far more likely:

        L = min(L, -c A)    where A < 0
    """
    return clipped(tokens.ratio, tokens.advantages, config)


def clipped(ratio: Tensor, advantages: Tensor, config: GrpoConfig) -> TokenLoss:
    """Return the clipped surrogate for these ratios and advantages, [tokens] each."""
    low, high = config.clip_range
    unclipped = ratio * advantages
    bounded = ratio.clamp(1 - low, 1 + high) * advantages
    values = -torch.minimum(unclipped, bounded)
    # Only the upper clip can bind for a positive advantage, and only the lower one for a negative advantage.
    removed = unclipped.detach() > bounded.detach()
    clip_low, clip_high = removed & (advantages < 0), removed & (advantages > 0)
    if config.dual_clip is not None:
        limit = -config.dual_clip * advantages
        beyond = (advantages < 0) & (values.detach() > limit)
        values, clip_high = torch.where(beyond, limit, values), clip_high | beyond
    return TokenLoss(values, clip_low, clip_high)
