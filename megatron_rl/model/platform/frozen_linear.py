"""Products with weights that stay unchanged for a while, on a CPU.

Each row of the result is the same bit for bit for any number of other rows and any order: an answer must not depend on
what else is answered at the same time. BLAS does not guarantee that. Its kernels for a few rows sum the terms in
another order than those for many, and the limit depends on the processor.

Large weights are repacked once for oneDNN. In fp32 that takes three quarters of the time of torch's linear for 64 rows
and half of it for 8, including the operation on the result, at the price of a second copy of the weights. In bf16, on a
processor that multiplies it, it takes two thirds of the time of fp32. oneDNN splits the terms of a sum by their number,
not by the number of rows, except for a single row.

Small weights stay in place and are multiplied by BLAS in blocks of a fixed number of rows. Several threads would split
a block by the number of blocks, so this is for one thread; with more threads, all weights are repacked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.functional import silu

TYPICAL_ROWS = 64
"""Rows for which the oneDNN layout is chosen; it serves other numbers too."""

LEAST_PACKED = 2**16
"""Elements of the smallest weight that is repacked. For smaller ones repacking, some tenths of a millisecond, takes
longer than a phase of generation gains."""

BLOCK_ROWS = 64
"""Rows of each BLAS product: a multiple of the 8 or 16 rows that its kernels process at once."""


class FrozenLinear(Protocol):
    """A product [rows, inputs] -> [rows, outputs] of one dtype, not for training."""

    rows_multiple: ClassVar[int]  # divisor of the allowed numbers of rows

    def __call__(self, rows: Tensor) -> Tensor: ...

    def silu(self, rows: Tensor) -> Tensor: ...

    def added(self, rows: Tensor, other: Tensor) -> Tensor:
        """other [rows, outputs] + the product."""

    def multiplied(self, rows: Tensor, other: Tensor) -> Tensor:
        """other [rows, outputs] * the product, element by element."""


def freeze(weight: Tensor, bias: Tensor | None = None) -> FrozenLinear:
    """Freeze a weight [outputs, inputs]. It is copied if it is repacked for oneDNN, else referenced, as the bias
    [outputs] is in both cases."""
    if weight.numel() < LEAST_PACKED and torch.get_num_threads() == 1:
        return PlainLinear(weight.t(), bias)
    return PackedLinear(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), TYPICAL_ROWS), bias)


@dataclass(frozen=True, slots=True)
class PlainLinear:
    columns: Tensor  # [inputs, outputs]
    bias: Tensor | None

    rows_multiple: ClassVar[int] = BLOCK_ROWS

    def __call__(self, rows: Tensor) -> Tensor:
        return self._product(rows, self.bias)

    def silu(self, rows: Tensor) -> Tensor:
        return silu(self(rows), inplace=True)

    def added(self, rows: Tensor, other: Tensor) -> Tensor:
        other = other if self.bias is None else other + self.bias
        return self._product(rows, other.view(len(other) // BLOCK_ROWS, BLOCK_ROWS, other.shape[1]))

    def multiplied(self, rows: Tensor, other: Tensor) -> Tensor:
        return self(rows).mul_(other)

    def _product(self, rows: Tensor, added: Tensor | None) -> Tensor:
        blocks = rows.view(len(rows) // BLOCK_ROWS, BLOCK_ROWS, rows.shape[1])
        columns = self.columns.expand(len(blocks), -1, -1)
        product = torch.bmm(blocks, columns) if added is None else torch.baddbmm(added, blocks, columns)
        return product.view(len(rows), columns.shape[2])


@dataclass(frozen=True, slots=True)
class PackedLinear:
    weight: Tensor  # weight in oneDNN's layout
    bias: Tensor | None

    rows_multiple: ClassVar[int] = 4

    def __call__(self, rows: Tensor) -> Tensor:
        return self._pointwise(rows, "none")

    def silu(self, rows: Tensor) -> Tensor:
        return self._pointwise(rows, "swish")

    def added(self, rows: Tensor, other: Tensor) -> Tensor:
        return self._binary(rows, other, "add")

    def multiplied(self, rows: Tensor, other: Tensor) -> Tensor:
        return self._binary(rows, other, "mul")

    def _pointwise(self, rows: Tensor, operation: str) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, self.weight, self.bias, operation, [], "")
        return result

    def _binary(self, rows: Tensor, other: Tensor, operation: str) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(rows, other, self.weight, self.bias, operation)
        return result


def freezes(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    multiplies_bf16: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32 or (dtype == torch.bfloat16 and multiplies_bf16)
