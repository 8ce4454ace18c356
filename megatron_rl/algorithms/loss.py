"""The GRPO loss over the trained tokens of a micro-batch: policy loss, importance weights, KL penalty and entropy
bonus."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_rl.algorithms.config import GrpoConfig
from megatron_rl.algorithms.importance import importance_weights, kept
from megatron_rl.algorithms.kl import kl_penalty
from megatron_rl.algorithms.losses.choice import LOSSES, OwnPolicyLoss, as_losses, own_policy_loss
from megatron_rl.algorithms.losses.token_loss import TokenLoss
from megatron_rl.algorithms.trained_tokens import TrainedTokens
from megatron_rl.metrics.stats import LossStats
from megatron_rl.recipe.own_code import is_own


def has_gradient(advantages: Tensor, carries_loss: Tensor, config: GrpoConfig) -> Tensor:
    """Return which trajectories have tokens with a nonzero gradient or loss in `grpo_loss`.

    Without a penalty or bonus every term of a token is a multiple of its advantage. A loss of the user's may train on
    any token.

    Args:
        advantages: [trajectories]
        carries_loss: [trajectories] 1, or 0 if the weights of its tokens are 0.

    Returns:
        [trajectories] bool
    """
    if config.kl_beta > 0 or config.entropy_coefficient > 0 or is_own(config.policy_loss):
        return carries_loss != 0
    return (carries_loss != 0) & (advantages != 0)


def grpo_loss(tokens: TrainedTokens, config: GrpoConfig) -> tuple[Tensor, LossStats]:
    """Return the weighted sum of the token losses. Per token, with weight w in the global mean:

        w (u L + kl_beta KL - entropy_coefficient H)

        L: the policy loss (`losses.choice`); one of the user's is w L already
        u: see `importance.importance_weights`, of old - inference; else 1. Tokens that `importance.kept` rejects have a
            term of 0
        KL: see `kl.kl_penalty`, times r = exp(log_prob - old) with `kl_importance`; with `kl_in: reward` it is
            subtracted from the advantage instead, as a constant at the weights before the step
        H: entropy of the distribution over the whole vocabulary

    A token with a log-prob or an entropy that is not finite (NaN from an engine, or -inf if rounding leaves a token no
    probability) is excluded and counted: its term is 0, like a masked token's. Otherwise the gradient of the whole
    update would be NaN.

    Returns:
        The loss, a scalar whose sum over micro-batches and ranks is the loss of the global batch, and its statistics.

    Raises:
        ValueError: kl_beta is above 0 without ref_logprobs, importance or rejection is per answer without
            answer_log_ratios, or a loss of the user's returns something else than one value for each token.
    """
    if config.kl_beta > 0 and tokens.ref_logprobs is None:
        raise ValueError("grpo.kl_beta above 0 needs ref_logprobs, the reference policy's log-probs")
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
        assert tokens.ref_logprobs is not None
        penalised = tokens.logprobs if config.kl_in == "loss" else tokens.old_logprobs
        kl = kl_penalty(penalised, tokens.ref_logprobs, config.kl_estimator)
        per_token["kl"] = kl.detach()
        if config.kl_in == "reward":
            tokens = replace(tokens, advantages=tokens.advantages - config.kl_beta * kl)
    own = own_policy_loss(config)
    policy_loss = LOSSES[config.policy_loss](tokens, config) if own is None else TokenLoss(_called(own, tokens, config))
    token_loss = policy_loss.values
    for name, clipped in (("clip_low", policy_loss.clip_low), ("clip_high", policy_loss.clip_high)):
        if clipped is not None:
            per_token[name] = clipped & trained
    if config.importance is not None:
        weight = importance_weights(tokens, config.importance)
        token_loss = token_loss * weight
        per_token["importance_weight"] = weight * trained
    # A loss of the user's is weighted already.
    share, weights = (1.0, tokens.weights) if own is None else (tokens.weights, 1.0)
    if kl is not None and config.kl_in == "loss":
        token_loss = token_loss + config.kl_beta * (kl * tokens.ratio if config.kl_importance else kl) * share
    if config.entropy_coefficient > 0:
        token_loss = token_loss - config.entropy_coefficient * tokens.entropy * share
    loss = (token_loss * weights).sum()
    return loss, loss_statistics(loss.detach(), per_token)


def _called(own: OwnPolicyLoss, tokens: TrainedTokens, config: GrpoConfig) -> Tensor:
    """Return the result of a loss of the user's. Raises ValueError if it is not one value for each token."""
    return as_losses(own(tokens, config), tokens)


def _only(tokens: TrainedTokens, trained: Tensor) -> TrainedTokens:
    """Replace all values of the other tokens, weights included, by 0: they may be anything, even NaN."""
    return tokens.each(lambda values: torch.where(trained, values, 0.0) if values.is_floating_point() else values)


def _finite(tokens: TrainedTokens, config: GrpoConfig) -> Tensor:
    """Return whether the entropy and all log-probs that the loss reads are finite, [tokens] bool."""
    finite = tokens.entropy.isfinite()
    finite &= tokens.logprobs.isfinite() & tokens.old_logprobs.isfinite() & tokens.inference_logprobs.isfinite()
    if config.kl_beta > 0 and tokens.ref_logprobs is not None:
        finite &= tokens.ref_logprobs.isfinite()
    return finite


def loss_statistics(loss: Tensor, per_token: dict[str, Tensor]) -> LossStats:
    """Return statistics of values that are 0 for untrained tokens, with one reduction for all of them."""
    values = torch.stack([value.to(torch.float32) for value in per_token.values()])
    sums = dict(zip(per_token, values.sum(dim=1).unbind(), strict=True))
    # Values with a maximum are never below 0: the added zero changes no maximum, and gives an empty micro-batch one.
    largest = dict(zip(per_token, torch.nn.functional.pad(values, (0, 1)).amax(dim=1).unbind(), strict=True))
    absent: dict[str, Any] = dict.fromkeys(("clip_low", "clip_high", "kl", "importance_weight", "rejected"))
    return LossStats(
        loss=loss,
        ratio_max=largest["ratio"],
        inference_difference_max=largest["inference_difference"],
        **{**absent, **sums},
    )
