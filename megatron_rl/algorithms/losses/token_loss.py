"""Result of a policy loss."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class TokenLoss(NamedTuple):
    """Losses of the tokens of a micro-batch, before their weights; every tensor is [tokens]."""

    values: Tensor
    """Losses, with gradient."""
    clip_low: Tensor | None = None
    """bool, tokens whose gradient the lower bound removes or reduces; None if the loss has no bounds."""
    clip_high: Tensor | None = None
    """bool, the same of the upper bound."""
