"""Products by weights that stay as they are for a while, on a CPU: laid out once in the way in which oneDNN reads them.

In fp32 that takes three quarters of the time of torch's linear of 64 rows and half of it of 8, what is done to the
result included, for a second copy of the weights. A row does not depend on how many others there are, bit for bit, nor
on the number of threads, where there are at least 3 of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TYPICAL_ROWS = 64
"""For which the layout is chosen; others are multiplied by the same."""


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """[rows, inputs] -> [rows, outputs] in fp32, not for training."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """A copy of the weight, [outputs, inputs]; the bias, [outputs], is read where it is."""
        return cls(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), TYPICAL_ROWS), bias)

    def __call__(self, rows: Tensor) -> Tensor:
        return self._pointwise(rows, "none")

    def silu(self, rows: Tensor) -> Tensor:
        """silu of the product."""
        return self._pointwise(rows, "swish")

    def added(self, rows: Tensor, other: Tensor) -> Tensor:
        """other [rows, outputs] + the product."""
        return self._binary(rows, other, "add")

    def multiplied(self, rows: Tensor, other: Tensor) -> Tensor:
        """other [rows, outputs] * the product, element by element."""
        return self._binary(rows, other, "mul")

    def _pointwise(self, rows: Tensor, operation: str) -> Tensor:
        made: Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, self.weight, self.bias, operation, [], "")
        return made

    def _binary(self, rows: Tensor, other: Tensor, operation: str) -> Tensor:
        made: Tensor = torch.ops.mkldnn._linear_pointwise.binary(rows, other, self.weight, self.bias, operation)
        return made


def packs(dtype: torch.dtype) -> bool:
    """Whether there can be such of this type here."""
    return dtype == torch.float32 and torch.backends.mkldnn.is_available()
