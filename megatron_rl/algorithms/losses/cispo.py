"""Clipped importance weights: CISPO."""

from __future__ import annotations

from megatron_rl.algorithms.config import GrpoConfig
from megatron_rl.algorithms.losses.token_loss import TokenLoss
from megatron_rl.algorithms.trained_tokens import TrainedTokens


def cispo(tokens: TrainedTokens, config: GrpoConfig) -> TokenLoss:
    """Return the loss of Clipped IS-weight Policy Optimization (MiniMax-M1, arXiv 2506.13585, equations 4 and 5). The
    bounds limit the weight of a token's gradient and remove no token:

        L = -stop_gradient(clamp(r, 1 - eps_low, 1 + eps_high)) A log_prob    r = exp(log_prob - old)

    The paper has no lower bound: `eps_low: 1`, the default of this loss. The value of L has no meaning of its own; its
    gradient is that of the objective.
    """
    low, high = config.clip_range
    ratio = tokens.ratio.detach()
    weight = ratio.clamp(1 - low, 1 + high)
    return TokenLoss(-weight * tokens.advantages * tokens.logprobs, ratio < 1 - low, ratio > 1 + high)
