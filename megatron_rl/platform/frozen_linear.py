"""Products by weights that stay as they are for a while, on a CPU: large ones laid out once in the way in which oneDNN
reads them.

In fp32 that takes three quarters of the time of torch's linear of 64 rows and half of it of 8, what is done to the
result included, for a second copy of the weights; in bf16, where the processor multiplies that, two thirds
of fp32's. A row does not depend on how many others there are, bit for bit, nor on the number of threads, where there
are at least 3 of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

TYPICAL_ROWS = 64
"""For which the layout is chosen; others are multiplied by the same."""

LEAST_PACKED = 2**16
"""Numbers of a weight. Of smaller ones it takes longer to lay them out, a tenth of a millisecond, than a phase of
generation gains."""


class FrozenLinear(Protocol):
    """[rows, inputs] -> [rows, outputs] of their type, not for training."""

    def __call__(self, rows: Tensor) -> Tensor: ...

    def silu(self, rows: Tensor) -> Tensor:
        """silu of the product."""
        ...

    def added(self, rows: Tensor, other: Tensor) -> Tensor:
        """other [rows, outputs] + the product."""
        ...

    def multiplied(self, rows: Tensor, other: Tensor) -> Tensor:
        """other [rows, outputs] * the product, element by element."""
        ...


def freeze(weight: Tensor, bias: Tensor | None = None) -> FrozenLinear:
    """The weight, [outputs, inputs], is copied where it is laid out anew, else read where it is, as the bias,
    [outputs], always is."""
    if weight.numel() < LEAST_PACKED:
        return PlainLinear(weight, bias)
    return PackedLinear(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), TYPICAL_ROWS), bias)


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """Implements `FrozenLinear` by torch's own operators."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, rows: Tensor) -> Tensor:
        return linear(rows, self.weight, self.bias)

    def silu(self, rows: Tensor) -> Tensor:
        """See `FrozenLinear.silu`."""
        return silu(self(rows), inplace=True)

    def added(self, rows: Tensor, other: Tensor) -> Tensor:
        """See `FrozenLinear.added`."""
        return self(rows).add_(other)

    def multiplied(self, rows: Tensor, other: Tensor) -> Tensor:
        """See `FrozenLinear.multiplied`."""
        return self(rows).mul_(other)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Implements `FrozenLinear` by oneDNN's."""

    weight: Tensor
    """In oneDNN's layout."""
    bias: Tensor | None

    def __call__(self, rows: Tensor) -> Tensor:
        return self._pointwise(rows, "none")

    def silu(self, rows: Tensor) -> Tensor:
        """See `FrozenLinear.silu`."""
        return self._pointwise(rows, "swish")

    def added(self, rows: Tensor, other: Tensor) -> Tensor:
        """See `FrozenLinear.added`."""
        return self._binary(rows, other, "add")

    def multiplied(self, rows: Tensor, other: Tensor) -> Tensor:
        """See `FrozenLinear.multiplied`."""
        return self._binary(rows, other, "mul")

    def _pointwise(self, rows: Tensor, operation: str) -> Tensor:
        made: Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, self.weight, self.bias, operation, [], "")
        return made

    def _binary(self, rows: Tensor, other: Tensor, operation: str) -> Tensor:
        made: Tensor = torch.ops.mkldnn._linear_pointwise.binary(rows, other, self.weight, self.bias, operation)
        return made


def freezes(dtype: torch.dtype) -> bool:
    """Whether there can be such of this type here."""
    if not torch.backends.mkldnn.is_available():
        return False
    multiplies_bf16: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32 or (dtype == torch.bfloat16 and multiplies_bf16)
