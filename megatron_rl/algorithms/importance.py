"""Correction for tokens sampled by a policy other than the one at the start of the step."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megatron_rl.algorithms.config import ImportanceConfig


@torch.no_grad()
def importance_weights(log_ratios: Tensor, config: ImportanceConfig) -> Tensor:
    """Return the weight of each token, with r = exp(log ratio) and the bounds `lower` and `upper`:

        truncate   min(max(r, lower), upper)
        mask       r where lower <= r <= upper, else 0

    The truncation (Ionides 2008, https://doi.org/10.1198/106186008X320456) bounds the variance due to tokens that the
    sampler found far less likely, at the price of a bias for these tokens. The mask excludes them from training.

    Args:
        log_ratios: [tokens] log-prob before the step minus that of the sampler; for whole answers see
            `answer_log_ratios`.

    Returns:
        [tokens], without gradient.
    """
    ratios = log_ratios.exp()
    if config.mode == "truncate":
        return ratios.clamp(min=config.lower, max=config.upper)
    for bound, outside in ((config.lower, torch.lt), (config.upper, torch.gt)):
        if bound is not None:
            ratios = torch.where(outside(ratios, bound), 0.0, ratios)
    return ratios


@torch.no_grad()
def answer_log_ratios(log_ratios: Tensor, lengths: Tensor, level: Literal["sequence", "geometric"]) -> Tensor:
    """Return, for each trained token, the sum (`sequence`) or mean (`geometric`) of the log ratios of its trajectory's
    trained tokens, those of all its sequences: together they are one sample of the policy. Ratios that are not finite
    are excluded, as the loss excludes the token: one NaN must not discard the whole answer.

    Args:
        log_ratios: [tokens] of the trained tokens of all trajectories, concatenated.
        lengths: [trajectories] number of tokens of each.

    Returns:
        [tokens]
    """
    if not len(lengths):  # segment_reduce fails without segments
        return log_ratios
    lengths = lengths.to(log_ratios.device)
    is_finite = log_ratios.isfinite()
    sums = torch.segment_reduce(torch.where(is_finite, log_ratios, 0.0).double(), "sum", lengths=lengths)
    if level == "geometric":
        sums = sums / torch.segment_reduce(is_finite.double(), "sum", lengths=lengths).clamp(min=1)
    return sums.to(log_ratios.dtype).repeat_interleave(lengths, output_size=len(log_ratios))
