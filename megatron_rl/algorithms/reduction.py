"""Reduction of token losses to the loss of the global batch, which no rank holds as a whole.

Every token's share of the global mean is fixed before the first micro-batch. The losses of micro-batches and ranks are
then simply added, so neither packing nor the data-parallel layout changes the gradient.
"""

from __future__ import annotations

from torch import Tensor

from megatron_rl.algorithms.config import LossReduction


def local_normaliser(lengths: Tensor, trained: Tensor, reduction: LossReduction) -> float:
    """Return this rank's part of the normaliser: its trained tokens, or its trained non-empty answers.

    Args:
        lengths: [trajectories] int64, answer tokens.
        trained: [trajectories] 0 or 1, which answers carry loss.

    Returns:
        A count; its sum over all ranks is the `normaliser` of `token_weights`.
    """
    counted = lengths if reduction == "token" else lengths > 0
    return float((counted * trained).sum())


def token_weights(lengths: Tensor, trained: Tensor, reduction: LossReduction, normaliser: float) -> Tensor:
    """Return the weight of each answer's tokens, such that the sum of weight * token loss is the global mean.

    `token`: 1 / normaliser, the mean over all trained tokens (DAPO, arXiv 2503.14476). `sequence`: 1 / (length *
    normaliser), the mean over answers of their token means (GRPO, arXiv 2402.03300).

    Args:
        lengths: [trajectories] int64, answer tokens.
        trained: [trajectories] 0 or 1, which answers carry loss.
        normaliser: sum of `local_normaliser` over all ranks; 0 if nothing is trained.

    Returns:
        [trajectories] fp32, 0 for answers that carry no loss.
    """
    share = trained.float() / (normaliser or 1.0)
    return share if reduction == "token" else share / lengths.clamp(min=1)
