"""The losses of the objectives over the trained tokens of a micro-batch: GRPO, alone or with a teacher, and supervised.

Each returns a scalar whose sum over micro-batches and ranks is the loss of the global batch, and its statistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megatron_rl.algorithms.loss_terms import importance_weights, kept, kl_penalty
from megatron_rl.algorithms.own_functions import as_losses, own_policy_loss
from megatron_rl.algorithms.policy_losses import LOSSES, TokenLoss
from megatron_rl.algorithms.trained_tokens import LOG_RATIO_LIMIT, TrainedTokens
from megatron_rl.rank.metrics.stats import BY_ENVIRONMENT, LossStats
from megatron_rl.recipe.grpo import GrpoConfig
from megatron_rl.recipe.own_code import is_own


def grpo_loss(
    tokens: TrainedTokens, config: GrpoConfig, counted: Mapping[str, Tensor] = MappingProxyType({})
) -> tuple[Tensor, LossStats]:
    """Return the weighted sum of the token losses. Per token, with weight w in the global mean:

        w (u L + kl_beta KL - entropy_coefficient H)

        L: the policy loss (`policy_losses`); one of the user's is w L already
        u: see `importance_weights`, of old - inference; else 1. Tokens that `kept` rejects have a
            term of 0
        KL: see `kl_penalty`, times r = exp(log_prob - old) with `kl_importance`; with `kl_in: reward` it is
            subtracted from the advantage instead, as a constant at the weights before the step
        H: entropy of the distribution over the whole vocabulary

    A token with a log-prob or an entropy that is not finite (NaN from an engine, or -inf if rounding leaves a token no
    probability) is excluded and counted: its term is 0, like a masked token's. Otherwise the gradient of the whole
    update would be NaN. `counted` has further values of tokens for the statistics, by the names of their fields.

    Raises:
        ValueError: kl_beta is above 0 without ref_logprobs, importance or rejection is per answer without
            answer_log_ratios, or a loss of the user's returns something else than one value for each token.
    """
    carries_loss = tokens.weights != 0
    trained = carries_loss & _finite(tokens, config)
    tokens = _only(tokens, trained)
    per_token = {
        "tokens": trained,
        "nonfinite": carries_loss & ~trained,
        "entropy": tokens.entropy.detach(),
        "ratio": tokens.ratio.detach() * trained,
        "inference_difference": (tokens.old_logprobs - tokens.inference_logprobs).abs(),
    }
    if config.rejection is not None:
        keeps = kept(tokens, config.rejection)
        per_token["rejected"] = trained & ~keeps
        trained = trained & keeps
        tokens = _only(tokens, trained)
    kl = None
    if config.kl_beta > 0:
        kl = _kl(tokens, config)
        per_token["kl"] = kl.detach()
        if config.kl_in == "reward":
            tokens = replace(tokens, advantages=tokens.advantages - config.kl_beta * kl)
    policy_loss = _policy_loss(tokens, config)
    token_loss = policy_loss.values
    for name, clipped in (("clip_low", policy_loss.clip_low), ("clip_high", policy_loss.clip_high)):
        if clipped is not None:
            per_token[name] = clipped & trained
    if config.importance is not None:
        weight = importance_weights(tokens, config.importance)
        token_loss = token_loss * weight
        per_token["importance_weight"] = weight * trained
    # A loss of the user's is weighted already.
    share, weights = (tokens.weights, 1.0) if is_own(config.policy_loss) else (1.0, tokens.weights)
    if kl is not None and config.kl_in == "loss":
        token_loss = token_loss + config.kl_beta * (kl * tokens.ratio if config.kl_importance else kl) * share
    if config.entropy_coefficient > 0:
        token_loss = token_loss - config.entropy_coefficient * tokens.entropy * share
    loss = (token_loss * weights).sum()
    return loss, loss_statistics(loss.detach(), {**per_token, **counted}, tokens)


@dataclass(frozen=True, slots=True)
class TaughtTokens:
    """Knowledge of teachers about trained tokens."""

    logprobs: Tensor  # [tokens] log-probs of the teachers
    weights: Tensor  # [tokens] or scalar, `distill.weight`; 0 where no teacher judges
    diverges: Tensor  # bool, [tokens] or scalar: whether the token's divergence teaches, instead of its advantage


def distillation_loss(tokens: TrainedTokens, taught: TaughtTokens, config: GrpoConfig) -> tuple[Tensor, LossStats]:
    """Return `grpo_loss` with weight * `teacher_advantages` added to the advantages, or with weight * the tokens'
    divergences added to the loss where these teach. A divergence that is not finite is left out; tokens that
    `grpo.rejection` rejects keep theirs, which does not depend on the policy that sampled."""
    differences = teacher_advantages(taught.logprobs, tokens.old_logprobs)
    judged = (tokens.weights != 0) & (taught.weights != 0)
    counted = {"teacher_kl": -differences.masked_fill(~judged, 0.0), "judged": judged}
    learned, divergences = judged & taught.diverges, tokens.divergences
    if divergences is not None:
        learned = learned & divergences.isfinite()
        divergences = torch.where(learned, divergences, 0.0)
        counted |= {"teacher_divergence": divergences.detach(), "diverged": learned}
    by_advantage = torch.where(taught.diverges, 0.0, taught.weights)
    tokens = replace(tokens, advantages=tokens.advantages + by_advantage * differences)
    loss, stats = grpo_loss(tokens, config, counted)
    if divergences is None:
        return loss, stats
    loss = loss + (taught.weights * divergences * torch.where(learned, tokens.weights, 0.0)).sum()
    return loss, replace(stats, loss=loss.detach())


def teacher_advantages(teacher_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return log p_teacher - log p_old of the sampled tokens, [tokens].

    Times the score of a token that p_old sampled, this is an unbiased estimate of minus the gradient of
    KL(p || p_teacher) at p = p_old, the reverse KL divergence of that position (arXiv 2306.08543):

        E[(log p_teacher - log p) grad log p] = -grad KL(p || p_teacher), because E[grad log p] = 0

    Its negative is the k1 estimate of that divergence. Values are clamped like log-ratios, and a value that is not a
    number, which neither side should give, counts as 0.

    Args:
        teacher_logprobs, old_logprobs: [tokens] log-probs of the teacher, and of the policy before the step.
    """
    difference = (teacher_logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.nan_to_num(difference, nan=0.0)


def supervised_loss(tokens: TrainedTokens) -> tuple[Tensor, LossStats]:
    """Return the weighted sum of the negative log-probs, -weight * log p(token): the cross-entropy of the rows.

    A token whose log-prob is not finite is left out and counted, as in `grpo_loss`.
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
    return loss, loss_statistics(loss.detach(), per_token, tokens)


def prediction_loss(logprobs: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weighted sum of the prediction layer's negative log-probs of trained tokens, and its fields of
    `LossStats`. A log-prob that is not finite is left out.

    logprobs, weights: [tokens], weights as in `TrainedTokens`.
    """
    learned = (weights != 0) & logprobs.isfinite()
    known = torch.where(learned, logprobs, 0.0)
    loss = -(known * torch.where(learned, weights, 0.0)).sum()
    return loss, {"prediction": -known.detach().sum(), "predicted": learned.sum()}


@torch.no_grad()
def measured_kl(tokens: TrainedTokens, config: GrpoConfig) -> Tensor:
    """Return the sum of the KL estimates of trained tokens without a penalty; one that is not finite counts as 0."""
    trained = (tokens.weights != 0) & _finite(tokens, config)
    tokens = _only(tokens, trained)
    if config.rejection is not None:
        tokens = _only(tokens, trained & kept(tokens, config.rejection))
    found = _kl(tokens, config)
    return torch.where(found.isfinite(), found, 0.0).sum()


def _kl(tokens: TrainedTokens, config: GrpoConfig) -> Tensor:
    if tokens.ref_logprobs is None:
        raise ValueError("grpo.kl_beta above 0 needs ref_logprobs, the reference policy's log-probs")
    penalised = tokens.logprobs if config.kl_in == "loss" else tokens.old_logprobs
    return kl_penalty(penalised, tokens.ref_logprobs, config.kl_estimator)


def _policy_loss(tokens: TrainedTokens, config: GrpoConfig) -> TokenLoss:
    if (own := own_policy_loss(config)) is None:
        return LOSSES[config.policy_loss](tokens, config)
    return TokenLoss(as_losses(own(tokens, config), tokens))


def _only(tokens: TrainedTokens, trained: Tensor) -> TrainedTokens:
    """Replace all values of the other tokens, weights included, by 0: they may be anything, even NaN."""
    return tokens.each(lambda values: torch.where(trained, values, 0.0) if values.is_floating_point() else values)


def _finite(tokens: TrainedTokens, config: GrpoConfig) -> Tensor:
    finite = tokens.entropy.isfinite()
    finite &= tokens.logprobs.isfinite() & tokens.old_logprobs.isfinite() & tokens.inference_logprobs.isfinite()
    if config.kl_beta > 0 and tokens.ref_logprobs is not None:
        finite &= tokens.ref_logprobs.isfinite()
    return finite


def loss_statistics(loss: Tensor, per_token: dict[str, Tensor], tokens: TrainedTokens) -> LossStats:
    """Return statistics of values that are 0 for untrained tokens, with one reduction for all of them."""
    values = torch.stack([value.to(torch.float32) for value in per_token.values()])
    sums = dict(zip(per_token, values.sum(dim=1).unbind(), strict=True))
    # Values with a maximum are never below 0: the added zero changes no maximum, and gives an empty micro-batch one.
    largest = dict(zip(per_token, torch.nn.functional.pad(values, (0, 1)).amax(dim=1).unbind(), strict=True))
    absent: dict[str, Any] = dict.fromkeys(("clip_low", "clip_high", "kl", "importance_weight", "rejected"))
    return LossStats(
        by_environment=_by_environment(per_token, tokens),
        loss=loss,
        ratio_max=largest["ratio"],
        inference_difference_max=largest["inference_difference"],
        **{**absent, **sums},
    )


def _by_environment(per_token: dict[str, Tensor], tokens: TrainedTokens) -> Tensor | None:
    """Return the sums of the values of BY_ENVIRONMENT for each environment, [environments, values] fp32."""
    if tokens.environment is None:
        return None
    none = torch.zeros_like(tokens.weights)
    rows = torch.stack([per_token.get(name, none).float() for name in BY_ENVIRONMENT], dim=1)
    return rows.new_zeros(tokens.environments, len(BY_ENVIRONMENT)).index_add(0, tokens.environment, rows)
