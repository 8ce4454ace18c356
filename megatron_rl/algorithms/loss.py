"""The GRPO loss over the trained tokens of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algorithms.config import GrpoConfig
from megatron_rl.algorithms.importance import importance_weights
from megatron_rl.algorithms.kl import kl_penalty
from megatron_rl.metrics.stats import LossStats

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this magnitude: exp of more than 88 is infinite in fp32, and infinity times 0 is NaN."""


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """The trained tokens of one micro-batch, all sequences concatenated; every tensor is [tokens] fp32.

    All log-probs are of softmax(logits / T), T the sampling temperature.
    """

    logprobs: Tensor
    """Log-probs of the policy in training; the only tensor with a gradient."""
    old_logprobs: Tensor
    """Log-probs at the weights before the step, or at those that sampled. On policy and before the first update they
    equal `logprobs.detach()`, so the ratio is exactly 1."""
    inference_logprobs: Tensor
    """Log-probs of the engine that sampled."""
    entropy: Tensor
    """Entropy of the distributions the tokens were drawn from; recorded only."""
    advantages: Tensor
    weights: Tensor
    """Each token's share of the global mean: see `reduction.token_weights`. 0 for tokens that carry no loss, whose
    other values may be anything, even NaN."""
    ref_logprobs: Tensor | None = None
    """Log-probs of the reference policy; needed if `kl_beta` is above 0."""
    answer_log_ratios: Tensor | None = None
    """Log ratios of the whole answer: see `importance.answer_log_ratios`; needed if `importance.mode` is sequence."""


def has_gradient(advantages: Tensor, carries_loss: Tensor, config: GrpoConfig) -> Tensor:
    """Return which trajectories have tokens with a nonzero gradient or loss in `grpo_loss`.

    Without a penalty or bonus every term of a token is a multiple of its advantage.

    Args:
        advantages: [trajectories]
        carries_loss: [trajectories] 1, or 0 if the weights of its tokens are 0.

    Returns:
        [trajectories] bool
    """
    if config.kl_beta > 0 or config.entropy_coefficient > 0:
        return carries_loss != 0
    return (carries_loss != 0) & (advantages != 0)


def grpo_loss(tokens: TrainedTokens, config: GrpoConfig) -> tuple[Tensor, LossStats]:
    """Return the weighted sum of the token losses (arXiv 2402.03300, asymmetric clip of arXiv 2503.14476). Per token:

        -w min(r A, clamp(r, 1 - eps_low, 1 + eps_high) A) + kl_beta KL - entropy_coefficient (-p log p)

        r = exp(log_prob - old)    w: see `importance.importance_weights`, of old - inference; else 1
        KL: see `kl.kl_penalty`    p = exp(log_prob), of the sampled token

    The entropy term is the sampled token's summand of the entropy, without importance ratio.

    A token with a log-prob that is not finite (NaN from an engine, or -inf if rounding leaves a token no probability)
    is excluded and counted: its term is 0, like a masked token's. Otherwise the gradient of the whole update would be
    NaN.

    Returns:
        The loss, a scalar whose sum over micro-batches and ranks is the loss of the global batch, and its statistics.

    Raises:
        ValueError: kl_beta is above 0 without ref_logprobs, or importance is per answer without answer_log_ratios.
    """
    if config.kl_beta > 0 and tokens.ref_logprobs is None:
        raise ValueError("grpo.kl_beta above 0 needs ref_logprobs, the reference policy's log-probs")
    carries_loss = tokens.weights != 0
    trained = carries_loss & _finite(tokens, config)
    weights = torch.where(trained, tokens.weights, 0.0)
    logprobs, old, inference = (
        torch.where(trained, values, 0.0)
        for values in (tokens.logprobs, tokens.old_logprobs, tokens.inference_logprobs)
    )
    ratio = (logprobs - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    unclipped = ratio * tokens.advantages
    clipped = ratio.clamp(1 - config.eps_low, 1 + config.eps_high) * tokens.advantages
    token_loss = -torch.minimum(unclipped, clipped)

    # Only the upper clip can bind for a positive advantage, and only the lower one for a negative advantage.
    removed = unclipped.detach() > clipped.detach()
    per_token = {
        "tokens": trained,
        "nonfinite": carries_loss & ~trained,
        "entropy": torch.where(trained, tokens.entropy, 0.0),
        "ratio": ratio.detach() * trained,
        "clip_low": removed & (tokens.advantages < 0) & trained,
        "clip_high": removed & (tokens.advantages > 0) & trained,
        "inference_difference": (old - inference).abs(),
    }
    if config.importance is not None:
        log_ratios = old - inference
        if config.importance.mode == "sequence":
            if tokens.answer_log_ratios is None:
                raise ValueError("grpo.importance of answers needs answer_log_ratios")
            log_ratios = torch.where(trained, tokens.answer_log_ratios, 0.0)
        weight = importance_weights(log_ratios, config.importance)
        token_loss = token_loss * weight
        per_token["importance_weight"] = weight * trained
    if config.kl_beta > 0:
        assert tokens.ref_logprobs is not None
        kl = kl_penalty(logprobs, torch.where(trained, tokens.ref_logprobs, 0.0), config.kl_estimator)
        token_loss = token_loss + config.kl_beta * kl
        per_token["kl"] = kl.detach()
    if config.entropy_coefficient > 0:
        token_loss = token_loss + config.entropy_coefficient * logprobs.exp() * logprobs

    loss = (token_loss * weights).sum()
    return loss, loss_statistics(loss.detach(), per_token)


def _finite(tokens: TrainedTokens, config: GrpoConfig) -> Tensor:
    """Return whether all log-probs that the loss reads are finite, [tokens] bool."""
    finite = tokens.logprobs.isfinite() & tokens.old_logprobs.isfinite() & tokens.inference_logprobs.isfinite()
    if config.kl_beta > 0 and tokens.ref_logprobs is not None:
        finite &= tokens.ref_logprobs.isfinite()
    return finite


def loss_statistics(loss: Tensor, per_token: dict[str, Tensor]) -> LossStats:
    """Return statistics of values that are 0 for untrained tokens, with one reduction for all of them."""
    values = torch.stack([value.to(torch.float32) for value in per_token.values()])
    sums = dict(zip(per_token, values.sum(dim=1).unbind(), strict=True))
    # Values with a maximum are never below 0: the added zero changes no maximum, and gives an empty micro-batch one.
    largest = dict(zip(per_token, torch.nn.functional.pad(values, (0, 1)).amax(dim=1).unbind(), strict=True))
    return LossStats(
        loss=loss,
        ratio_max=largest["ratio"],
        inference_difference_max=largest["inference_difference"],
        kl=sums.pop("kl", None),
        importance_weight=sums.pop("importance_weight", None),
        **sums,
    )
