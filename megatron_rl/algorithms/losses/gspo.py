"""Sequence-level clipping: GSPO and its token variant."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.algorithms.config import GrpoConfig
from megatron_rl.algorithms.losses.clip import clipped
from megatron_rl.algorithms.losses.token_loss import TokenLoss
from megatron_rl.algorithms.trained_tokens import LOG_RATIO_LIMIT, TrainedTokens


def gspo(tokens: TrainedTokens, config: GrpoConfig) -> TokenLoss:
    """Return the loss of Group Sequence Policy Optimization (arXiv 2507.18071, equations 5 to 7), the clipped surrogate
    of a ratio s that all trained tokens of a sequence share:

        L = -min(s A, clamp(s, 1 - eps_low, 1 + eps_high) A)    s = exp(mean over the sequence of (log_prob - old))

    The paper averages over sequences: `grpo.reduction: sequence`.
    """
    return clipped(_log_ratio(tokens).exp(), tokens.advantages, config)


def gspo_token(tokens: TrainedTokens, config: GrpoConfig) -> TokenLoss:
    """Return the loss of GSPO-token (arXiv 2507.18071, equations 13 and 14), with advantages that may differ within a
    sequence. Each token's ratio has the value of s, and its gradient flows through the token's own log-prob only:

        s_t = stop_gradient(s) p / stop_gradient(p)    p = exp(log_prob)

    With equal advantages in a sequence and `grpo.reduction: sequence` the gradient is that of `gspo`.
    """
    log_ratio = _log_ratio(tokens).detach() + tokens.logprobs - tokens.logprobs.detach()
    return clipped(log_ratio.exp(), tokens.advantages, config)


def _log_ratio(tokens: TrainedTokens) -> Tensor:
    """Return log s, [tokens]."""
    return tokens.sequence_mean(tokens.logprobs - tokens.old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
