"""Correction for tokens sampled by a policy other than the one at the start of the step."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.config import ImportanceConfig


@torch.no_grad()
def importance_weights(log_ratios: Tensor, config: ImportanceConfig) -> Tensor:
    """Return the weight of each token, with r = exp(log ratio):

        truncate, sequence   min(r, cap)
        mask                 r where 1 / cap <= r <= cap, else 0

    The truncation (Ionides 2008, https://doi.org/10.1198/106186008X320456) bounds the variance due to tokens that the
    sampler found far less likely, at the price of a bias for these tokens. The mask excludes them from training.

    Args:
        log_ratios: [tokens] log-prob before the step minus that of the sampler; for `mode: sequence` see
            `answer_log_ratios`.

    Returns:
        [tokens], without gradient.
    """
    ratios = log_ratios.exp()
    if config.mode == "mask":
        return torch.where((ratios >= 1 / config.cap) & (ratios <= config.cap), ratios, 0.0)
    return ratios.clamp(max=config.cap)


@torch.no_grad()
def answer_log_ratios(log_ratios: Tensor, lengths: Tensor) -> Tensor:
    """Return, for each trained token, the sum of the log ratios of its trajectory's trained tokens, those of all its
    sequences: together they are one sample of the policy. Ratios that are not finite are excluded from the sum, as the
    loss excludes the token: one NaN must not discard the whole answer.

    Args:
        log_ratios: [tokens] of the trained tokens of all trajectories, concatenated.
        lengths: [trajectories] number of tokens of each.

    Returns:
        [tokens]
    """
    if not len(lengths):  # segment_reduce fails without segments
        return log_ratios
    lengths = lengths.to(log_ratios.device)
    finite = torch.where(log_ratios.isfinite(), log_ratios, 0.0)
    sums = torch.segment_reduce(finite.double(), "sum", lengths=lengths)
    return sums.to(log_ratios.dtype).repeat_interleave(lengths, output_size=len(log_ratios))
