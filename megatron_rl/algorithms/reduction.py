"""Reduction of token losses to the loss of the global batch, which no rank holds as a whole.

Every token's share of the global mean is fixed before the first micro-batch. The losses of micro-batches and ranks are
then simply added, so neither packing nor the data-parallel layout changes the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.recipe.grpo import BranchWeighting, LossReduction


def sequence_weights(lengths: Tensor, trajectory: Tensor, trained: Tensor, branches: BranchWeighting) -> Tensor:
    """Return the weight of each sequence among those of all trajectories.

    `sum`: 1, so a trajectory weighs as much as it has sequences. `mean`: 1 / the number of the trajectory's sequences
    with trained tokens, so each trajectory weighs as much as one with a single sequence.

    Args:
        lengths: [sequences] int64, trained tokens.
        trajectory: [sequences] int64, index of the trajectory.
        trained: [trajectories] 0 or 1, which trajectories carry loss.

    Returns:
        [sequences] fp64, 0 for those of trajectories that carry no loss.
    """
    weights = trained.double()
    if branches == "mean":
        counts = torch.zeros_like(weights).index_add(0, trajectory, (lengths > 0).double())
        weights = weights / counts.clamp(min=1)
    return weights[trajectory]


def local_normaliser(lengths: Tensor, weights: Tensor, reduction: LossReduction) -> float:
    """Return this rank's part of the normaliser: its trained tokens, or its trained non-empty sequences, each counted
    by its weight.

    Args:
        lengths: [sequences] int64, trained tokens.
        weights: [sequences] see `sequence_weights`.

    Returns:
        A weighted count; its sum over all ranks is the `normaliser` of `token_weights`.
    """
    counted = lengths if reduction == "token" else lengths > 0
    return float((counted * weights.double()).sum())


def token_weights(
    lengths: Tensor, weights: Tensor, reduction: LossReduction, normaliser: float, constant: int = 1
) -> Tensor:
    """Return the weight of the tokens of each sequence, such that the sum of weight * token loss is the global mean.

    `token`: weight / normaliser, the mean over all trained tokens (DAPO, arXiv 2503.14476). `sequence`: weight /
    (length * normaliser), the mean over sequences of their token means (GRPO, arXiv 2402.03300). `constant`: weight /
    (constant * normaliser), the mean over sequences of their token sums, divided by a constant that depends on no
    sequence (Dr. GRPO, arXiv 2503.20783, section 3.2).

    Args:
        lengths: [sequences] int64, trained tokens.
        weights: [sequences] see `sequence_weights`.
        normaliser: sum of `local_normaliser` over all ranks; 0 if nothing is trained.
        constant: divisor of `constant`, in tokens.

    Returns:
        [sequences] fp32, 0 for those that carry no loss.
    """
    share = weights.float() / (normaliser or 1.0)
    match reduction:
        case "token":
            return share
        case "sequence":
            return share / lengths.clamp(min=1)
        case "constant":
            return share / constant
