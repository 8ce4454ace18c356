"""The GRPO loss over the generated tokens of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algorithms.config import GrpoConfig
from megatron_rl.algorithms.importance import truncated_weights
from megatron_rl.algorithms.kl import kl_penalty


@dataclass(frozen=True, slots=True)
class GrpoInputs:
    """The generated tokens of one micro-batch, all answers one after the other; every tensor is [tokens] fp32.

    All log-probs are of softmax(logits / T), T the sampling temperature.
    """

    logprobs: Tensor
    """Of the policy in training; the only tensor with a gradient."""
    old_logprobs: Tensor
    """At the weights that sampled. With a single update these are `logprobs.detach()`: the ratio is exactly 1."""
    advantages: Tensor
    weights: Tensor
    """Each token's share of the global mean, see `reduction.token_weights`; 0 for tokens that carry no loss."""
    inference_logprobs: Tensor | None = None
    """Of the engine that sampled."""
    ref_logprobs: Tensor | None = None
    """Of the reference policy; needed when `kl_beta` is above 0."""


@dataclass(frozen=True, slots=True)
class GrpoStats:
    """What the loss saw, over the tokens whose weight is not 0; scalars without gradient."""

    sums: dict[str, Tensor]
    """Add over micro-batches and ranks, then divide by `tokens` for the mean.

    tokens                the number of tokens
    ratio                 exp(logprobs - old_logprobs)
    clip_low, clip_high   number of tokens whose gradient the lower, the upper clip removed
    kl                    the penalty, before kl_beta; present when kl_beta is above 0
    inference_difference  |old - inference log-prob|; present when inference_logprobs are
    importance_weight     truncated importance weight; present with importance_cap
    """
    maxima: dict[str, Tensor]
    """Largest `ratio` and `inference_difference`: take the maximum over micro-batches and ranks. 0 without tokens."""


def grpo_loss(inputs: GrpoInputs, config: GrpoConfig) -> tuple[Tensor, GrpoStats]:
    """Weighted sum of the token losses (arXiv 2402.03300, asymmetric clip of arXiv 2503.14476). Per token:

        -w min(r A, clamp(r, 1 - eps_low, 1 + eps_high) A) + kl_beta KL - entropy_coefficient (-p log p)

        r = exp(log_prob - old)    w = min(exp(old - inference), importance_cap), or 1 where there is no cap
        KL: see `kl.kl_penalty`    p = exp(log_prob), of the sampled token

    The entropy term is the sampled token's summand of the entropy, without importance ratio.

    Returns:
        The loss, a scalar whose sum over micro-batches and ranks is the loss of the global batch, and the stats.

    Raises:
        ValueError: an option needs log-probs that `inputs` lacks.
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    ratio = log_ratio.exp()
    unclipped = ratio * inputs.advantages
    clipped = ratio.clamp(1 - config.eps_low, 1 + config.eps_high) * inputs.advantages
    token_loss = -torch.minimum(unclipped, clipped)

    # Where the advantage is positive only the upper clip can bind, where it is negative only the lower one.
    removed = unclipped.detach() > clipped.detach()
    per_token = {
        "tokens": torch.ones_like(removed),
        "ratio": ratio.detach(),
        "clip_low": removed & (inputs.advantages < 0),
        "clip_high": removed & (inputs.advantages > 0),
    }
    if config.importance_cap is not None:
        if inputs.inference_logprobs is None:
            raise ValueError("grpo.importance_cap needs inference_logprobs, the engine's log-probs of its tokens")
        weight = truncated_weights(inputs.old_logprobs, inputs.inference_logprobs, config.importance_cap)
        token_loss = token_loss * weight
        per_token["importance_weight"] = weight
    if config.kl_beta > 0:
        if inputs.ref_logprobs is None:
            raise ValueError("grpo.kl_beta above 0 needs ref_logprobs, the reference policy's log-probs")
        kl = kl_penalty(inputs.logprobs, inputs.ref_logprobs, config.kl_estimator)
        token_loss = token_loss + config.kl_beta * kl
        per_token["kl"] = kl.detach()
    if config.entropy_coefficient > 0:
        token_loss = token_loss + config.entropy_coefficient * inputs.logprobs.exp() * inputs.logprobs
    if inputs.inference_logprobs is not None:
        per_token["inference_difference"] = (inputs.old_logprobs - inputs.inference_logprobs).abs()

    return (token_loss * inputs.weights).sum(), _stats(per_token, trained=inputs.weights != 0)


def _stats(per_token: dict[str, Tensor], trained: Tensor) -> GrpoStats:
    """Sums and maxima over the trained tokens, with one reduction for all of them."""
    values = torch.stack([value.to(torch.float32) for value in per_token.values()]) * trained
    sums = dict(zip(per_token, values.sum(dim=1).unbind(), strict=True))
    # The two maxima are of values never below 0: a column of zeros changes neither and gives an empty micro-batch one.
    largest = dict(zip(per_token, torch.nn.functional.pad(values, (0, 1)).amax(dim=1).unbind(), strict=True))
    return GrpoStats(sums, {name: largest[name] for name in ("ratio", "inference_difference") if name in largest})
