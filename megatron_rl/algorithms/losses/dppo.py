"""Trust region by divergence: DPPO."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.config import GrpoConfig
from megatron_rl.algorithms.losses.token_loss import TokenLoss
from megatron_rl.algorithms.trained_tokens import TrainedTokens

LARGEST_RATIO = 20.0
"""Bound of the gradient's weight. A rare token may have a huge ratio within the trust region."""
SMALLEST = 1e-8
"""Added to the probability of all other tokens, which rounding may make 0."""


def dppo(tokens: TrainedTokens, config: GrpoConfig) -> TokenLoss:
    """Return the loss of Divergence PPO with a binary divergence (arXiv 2602.04879, equations 13 and 14). A token is
    excluded if it has left the trust region and its gradient would lead further away. Ratios near 1 say little about
    the change of a likely token, and large ratios little about that of a rare one; the divergence of the two-valued
    distributions (p, 1 - p) and (q, 1 - q) does.

        L = -M stop_gradient(min(r, 20)) A log_prob    r = p / q    p = exp(log_prob)    q = exp(old)
        M = 0 where D > eps_high, A > 0 and p > q, or where D > eps_low, A < 0 and p < q; else 1
        D = |p - q| (`dppo_divergence: tv`), or q log(q / p) + (1 - q) log((1 - q) / (1 - p)) (`kl`)

    The value of L has no meaning of its own; its gradient is that of the objective.
    """
    low, high = config.clip_range
    new, old = tokens.logprobs.detach().exp(), tokens.old_logprobs.exp()
    divergence = _divergence(tokens, new, old, config)
    clip_low = (divergence > low) & (tokens.advantages < 0) & (new < old)
    clip_high = (divergence > high) & (tokens.advantages > 0) & (new > old)
    weight = tokens.ratio.detach().clamp(max=LARGEST_RATIO)
    values = torch.where(clip_low | clip_high, 0.0, -weight * tokens.advantages * tokens.logprobs)
    return TokenLoss(values, clip_low, clip_high)


def _divergence(tokens: TrainedTokens, new: Tensor, old: Tensor, config: GrpoConfig) -> Tensor:
    if config.dppo_divergence == "kl":
        others = torch.log((1 - old + SMALLEST) / (1 - new + SMALLEST))
        return old * (tokens.old_logprobs - tokens.logprobs.detach()) + (1 - old) * others
    return (new - old).abs()
