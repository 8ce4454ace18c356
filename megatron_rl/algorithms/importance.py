"""Correction for tokens sampled by an engine whose log-probs are not quite the trainer's."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def truncated_weights(old_logprobs: Tensor, inference_logprobs: Tensor, cap: float) -> Tensor:
    """Weight min(exp(old - inference), cap) of each token: truncated importance sampling.

    The truncation (Ionides 2008, https://doi.org/10.1198/106186008X320456) bounds the variance that a token the
    engine found far less likely than the trainer would bring in; the price is a bias for just these tokens.

    Args:
        old_logprobs: [tokens], by the trainer at the weights that sampled.
        inference_logprobs: [tokens], by the engine that sampled.
        cap: largest weight, above 0.

    Returns:
        [tokens], without gradient.
    """
    return (old_logprobs - inference_logprobs).exp().clamp(max=cap)
