"""Soft gates in place of clipping: SAPO."""

from __future__ import annotations

import torch

from megatron_rl.algorithms.config import GrpoConfig
from megatron_rl.algorithms.losses.token_loss import TokenLoss
from megatron_rl.algorithms.trained_tokens import TrainedTokens

TAU_POSITIVE = 1.0
"""Temperature for tokens of positive advantage in the paper's experiments."""
TAU_NEGATIVE = 1.05
"""Temperature for the other tokens; larger, because their gradients make training less stable."""


def sapo(tokens: TrainedTokens, config: GrpoConfig) -> TokenLoss:
    """Return the loss of Soft Adaptive Policy Optimization (arXiv 2511.20347). A sigmoid gate lets
    the gradient fade with the distance of the ratio from 1:

        L = -4 / tau sigmoid(tau (r - 1)) A    r = exp(log_prob - old)
        tau: sapo_tau_positive where A > 0, else sapo_tau_negative

    At r = 1 the gradient is that of `clip`. The paper averages over sequences: `grpo.reduction: sequence`.
    """
    positive = TAU_POSITIVE if config.sapo_tau_positive is None else config.sapo_tau_positive
    negative = TAU_NEGATIVE if config.sapo_tau_negative is None else config.sapo_tau_negative
    tau = torch.full_like(tokens.advantages, negative).masked_fill(tokens.advantages > 0, positive)
    gate = torch.sigmoid(tau * (tokens.ratio - 1)) * 4 / tau
    return TokenLoss(-gate * tokens.advantages)
