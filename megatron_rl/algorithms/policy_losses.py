"""The policy losses that `grpo.policy_loss` names: each token's loss before its weight, from the ratio of the policy to
the one before the step, and the token's advantage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl.algorithms.trained_tokens import LOG_RATIO_LIMIT, TrainedTokens
from megatron_rl.recipe.grpo import GrpoConfig

TAU_POSITIVE = 1.0
"""Temperature for tokens of positive advantage in the paper's experiments."""
TAU_NEGATIVE = 1.05
"""Temperature for the other tokens; larger, because their gradients make training less stable."""
LARGEST_RATIO = 20.0
"""Bound of the gradient's weight. A rare token may have a huge ratio within the trust region."""
SMALLEST = 1e-8
"""Added to the probability of all other tokens, which rounding may make 0."""


class TokenLoss(NamedTuple):
    """Losses of the tokens of a micro-batch, before their weights; every tensor is [tokens]."""

    values: Tensor  # losses, with gradient
    clip_low: Tensor | None = None
    """bool, tokens whose gradient the lower bound removes or reduces; None if the loss has no bounds."""
    clip_high: Tensor | None = None  # bool, the same of the upper bound


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


def cispo(tokens: TrainedTokens, config: GrpoConfig) -> TokenLoss:
    """Return the loss of Clipped IS-weight Policy Optimization (MiniMax-M1, arXiv 2506.13585, equations 4 and 5). The
    bounds limit the weight of a token's gradient and remove no token:

        L = -stop_gradient(clamp(r, 1 - eps_low, 1 + eps_high)) A log_prob    r = exp(log_prob - old)

    The paper has no lower bound: `eps_low: 1`, the default of this loss. The value of L has no meaning; its
    gradient is that of the objective.
    """
    low, high = config.clip_range
    ratio = tokens.ratio.detach()
    weight = ratio.clamp(1 - low, 1 + high)
    return TokenLoss(-weight * tokens.advantages * tokens.logprobs, ratio < 1 - low, ratio > 1 + high)


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


def dppo(tokens: TrainedTokens, config: GrpoConfig) -> TokenLoss:
    """Return the loss of Divergence PPO with a binary divergence (arXiv 2602.04879, equations 13 and 14). A token is
    excluded if it has left the trust region and its gradient would lead further away. Ratios near 1 say little about
    the change of a likely token, and large ratios little about that of a rare one; the divergence of the two-valued
    distributions (p, 1 - p) and (q, 1 - q) does.

        L = -M stop_gradient(min(r, 20)) A log_prob    r = p / q    p = exp(log_prob)    q = exp(old)
        M = 0 where D > eps_high, A > 0 and p > q, or where D > eps_low, A < 0 and p < q; else 1
        D = |p - q| (`dppo_divergence: tv`), or q log(q / p) + (1 - q) log((1 - q) / (1 - p)) (`kl`)

    The value of L has no meaning; its gradient is that of the objective.
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


def reinforce(tokens: TrainedTokens, config: GrpoConfig) -> TokenLoss:
    """Return the loss of REINFORCE (Williams 1992, https://doi.org/10.1007/BF00992696):

        L = -A log_prob

    It has neither a ratio nor a bound: with several updates per step, or tokens of older weights, only
    `grpo.importance` corrects for the difference of the policies. The value of L has no meaning.
    """
    return TokenLoss(-tokens.advantages * tokens.logprobs)


PolicyLoss = Callable[[TrainedTokens, GrpoConfig], TokenLoss]

LOSSES: Mapping[str, PolicyLoss] = {
    "clip": clip,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo,
    "sapo": sapo,
    "dppo": dppo,
    "reinforce": reinforce,
}
