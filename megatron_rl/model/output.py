"""The output layer as one tensor-parallel rank has it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear


@dataclass(frozen=True, slots=True)
class OutputPart:
    """Some rows of the output layer, each of which makes the logit of one token."""

    weight: Tensor
    """[rows, hidden]"""
    tokens: range
    """Whose rows these are, the first ones; further rows pad the vocabulary."""
    group: dist.ProcessGroup | None
    """Ranks that have the other rows; None where there are none."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[predictors, hidden] -> [predictors, len(tokens)]"""
        return linear(hidden, self.weight)[:, : len(self.tokens)]
