"""Correction for tokens sampled by a policy other than the one at the start of the step."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.trained_tokens import LOG_RATIO_LIMIT, TrainedTokens
from megatron_rl.recipe.grpo import KlEstimator
from megatron_rl.recipe.ratio_bounds import ImportanceConfig, RatioBounds, RejectionConfig


@torch.no_grad()
def importance_weights(tokens: TrainedTokens, config: ImportanceConfig) -> Tensor:
    """Return the weight min(max(r, lower), upper) of each token, with r its ratio at `config.level`.

    The truncation (Ionides 2008, https://doi.org/10.1198/106186008X320456) bounds the variance due to tokens that the
    sampler found far less likely, at the price of a bias for these tokens.

    Returns:
        [tokens], finite, without gradient.
    """
    return _ratios(tokens, config).clamp(min=config.lower, max=config.upper)


@torch.no_grad()
def kept(tokens: TrainedTokens, config: RejectionConfig) -> Tensor:
    """Return which tokens have lower <= r <= upper, with r their ratio at `config.level`; [tokens] bool."""
    ratios = _ratios(tokens, config)
    inside = torch.ones_like(ratios, dtype=torch.bool)
    if config.lower is not None:
        inside &= ratios >= config.lower
    if config.upper is not None:
        inside &= ratios <= config.upper
    return inside


def _ratios(tokens: TrainedTokens, config: RatioBounds) -> Tensor:
    log_ratios = tokens.old_logprobs - tokens.inference_logprobs
    if config.level != "token":
        if tokens.answer_log_ratios is None or tokens.answer_tokens is None:
            raise ValueError(f"ratios of level {config.level} need answer_log_ratios and answer_tokens")
        log_ratios = tokens.answer_log_ratios
        if config.level == "geometric":
            log_ratios = log_ratios / tokens.answer_tokens.clamp(min=1)
    return log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


@torch.no_grad()
def answer_log_ratios(log_ratios: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each trained token, the sum of the log ratios of its trajectory's trained tokens, those of all its
    sequences, and their number: together they are one sample of the policy. Ratios that are not finite are excluded,
    as the loss excludes the token: one NaN must not discard the whole answer.

    Args:
        log_ratios: [tokens] of the trained tokens of all trajectories, concatenated.
        lengths: [trajectories] number of tokens of each.

    Returns:
        [tokens] each.
    """
    if not len(lengths):  # segment_reduce fails without segments
        return log_ratios, log_ratios
    lengths = lengths.to(log_ratios.device)
    is_finite = log_ratios.isfinite()
    both = torch.stack((torch.where(is_finite, log_ratios, 0.0), is_finite), dim=1).double()
    of_answers = torch.segment_reduce(both, "sum", lengths=lengths)
    of_tokens = of_answers.to(log_ratios.dtype).repeat_interleave(lengths, dim=0, output_size=len(log_ratios))
    sums, counts = of_tokens.unbind(dim=1)
    return sums, counts


LARGEST_D = 20.0
"""Largest d that k3 exponentiates: exp(88) is infinite in fp32, and infinity times a gradient of 0 is NaN."""
LARGEST_K3 = 10.0
"""Largest k3 penalty of a token, reached at d = 2.61 and at d = -11. Beyond it the gradient is 0; without the bound a
single token that the policy has almost abandoned could dominate the step (at d = 15 its gradient is -3.27e6). verl,
NeMo-RL and SkyRL use the same two bounds."""


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """Return the penalty of each token for deviating from the reference policy, with d = ref_logprobs - logprobs.

    As *values*, averaged over tokens sampled from the policy, k1 and k3 are unbiased for KL(policy || reference); k3 is
    never negative and has less variance; k2 has little bias while the policies are close
    (http://joschu.net/blog/kl-approx.html).

    As a *loss* they differ more, because the gradient of a sampled estimate ignores the effect on the sampling. Per
    token, with g the gradient of logprobs, and its average on policy:

        k1 = -d              g              zero: only noise. Useful as a value, not as a penalty
        k2 = d^2 / 2         -d g           the gradient of KL(policy || reference)
        k3 = exp(d) - d - 1  (1 - exp(d)) g the gradient of KL(reference || policy): the same minimum and, close
                                            to it, the same pull. Bounded: min(k3, 10), with gradient 0 above 10

    Off policy the averages are over the sampling policy. `grpo.kl_importance` multiplies the penalty by the ratio r =
    p / p(before the step), with gradient: then the value and the gradient of r k3 are those of KL(policy || reference)
    for all policies (DeepSeek-V3.2, arXiv 2512.02556, section 3.1).

    `grpo.kl_in: reward` takes the value as a cost of the sampled token. By the policy gradient k1 then has the gradient
    of KL(policy || reference) for the distribution of each token, as k2 has in the loss.

    Args:
        logprobs: [tokens], of the policy; the gradient flows here.
        ref_logprobs: [tokens], of the reference, without gradient.

    Returns:
        [tokens]
    """
    d = ref_logprobs - logprobs
    match estimator:
        case "k1":
            return -d
        case "k2":
            return d.square() / 2
        case "k3":
            d = d.clamp(max=LARGEST_D)
            return (d.expm1() - d).clamp(max=LARGEST_K3)
