"""Correction for tokens that another policy sampled than the one that a step begins with."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.config import ImportanceConfig


@torch.no_grad()
def importance_weights(log_ratios: Tensor, config: ImportanceConfig) -> Tensor:
    """Weight of each token, r = exp(log ratio):

        truncate, sequence   min(r, cap)
        mask                 r where 1 / cap <= r <= cap, else 0

    The truncation (Ionides 2008, https://doi.org/10.1198/106186008X320456) bounds the variance that a token the
    sampler found far less likely would bring in; the price is a bias for just these tokens. The mask has the trainer
    leave them alone.

    Args:
        log_ratios: [tokens] log-prob before the step minus that of the sampler; of `mode: sequence` see
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
    """Sum of the log ratios of a trajectory's trained tokens, for each of them. A token whose ratio is not finite is
    left out of the sum, as the loss leaves it out: one NaN must not cost the whole answer.

    Args:
        log_ratios: [tokens] of the trained tokens of all trajectories, one after the other.
        lengths: [trajectories] how many are of each.

    Returns:
        [tokens]
    """
    if not len(lengths):  # segment_reduce wants one
        return log_ratios
    lengths = lengths.to(log_ratios.device)
    finite = torch.where(log_ratios.isfinite(), log_ratios, 0.0)
    sums = torch.segment_reduce(finite.double(), "sum", lengths=lengths)
    return sums.to(log_ratios.dtype).repeat_interleave(lengths, output_size=len(log_ratios))
