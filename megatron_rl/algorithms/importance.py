"""Correction for tokens sampled by a policy other than the one at the start of the step."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.config import ImportanceConfig, RatioBounds, RejectionConfig
from megatron_rl.algorithms.trained_tokens import LOG_RATIO_LIMIT, TrainedTokens


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
