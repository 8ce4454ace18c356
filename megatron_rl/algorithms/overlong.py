"""Treatment of answers that reach, or approach, the limit of new tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.config import OverlongConfig


def overlong_penalty(length: Tensor, *, max_new_tokens: int, buffer: int, penalty: float) -> Tensor:
    """Return DAPO's soft overlong punishment (arXiv 2503.14476 eq. 13), which is added to the reward of each answer.

    0 up to `max_new_tokens - buffer` tokens, then falling linearly to `-penalty` at `max_new_tokens`.

    Args:
        length: [trajectories] integer, tokens of each answer.
        max_new_tokens: the limit, in tokens.
        buffer: tokens before the limit over which the penalty grows, above 0.
        penalty: reward subtracted at the limit, not negative.

    Returns:
        [trajectories] fp64, each in [-penalty, 0].
    """
    into_buffer = (length - (max_new_tokens - buffer)).double() / buffer
    return into_buffer.clamp(0, 1).mul(-penalty)


def shaped_rewards(rewards: Tensor, length: Tensor, *, max_new_tokens: int, overlong: OverlongConfig) -> Tensor:
    """Return the rewards for the advantages, [trajectories]: after the overlong penalty in `mode: penalty`."""
    if overlong.mode != "penalty":
        return rewards
    return rewards + overlong_penalty(
        length, max_new_tokens=max_new_tokens, buffer=overlong.buffer, penalty=overlong.penalty
    )


def trained_mask(cut: Tensor, overlong: OverlongConfig) -> Tensor:
    """Return which answers carry loss: all, or in `mode: mask` only those that were not cut off.

    A masked answer still counts in its group's mean, because it is a sample of the policy like the others.

    Args:
        cut: [trajectories] bool, whether the answer ended at the limit of new tokens (finish reason `length`).

    Returns:
        [trajectories] fp32, 1 for answers that are trained on, else 0.
    """
    return (~cut).float() if overlong.mode == "mask" else torch.ones_like(cut, dtype=torch.float32)
