"""Products by weights that do not change for a while, on a CPU.

A row of the result is the same bit for bit however many other rows there are and wherever it stands among them: an
answer must not depend on what else is answered at the same time. BLAS promises no such thing. Its kernels for a few
rows add a row's terms in another order than those for many, and how few "a few" is depends on the processor.

Large weights are laid out once for oneDNN. In fp32 that takes three quarters of the time of torch's linear for 64 rows
and half of it for 8, with the operation on the result included, in exchange for a second copy of the weights; in bf16,
on a processor that multiplies it, two thirds of fp32's. oneDNN splits the terms of a sum by how many terms there are,
not by how many rows, unless there is one row only.

Small weights are multiplied by BLAS where they are, in blocks that all have the same number of rows. Several threads
would share a block out by how many blocks there are, so this is for one thread; with more, all weights are laid out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.functional import silu

TYPICAL_ROWS = 64
"""For which the layout is chosen; others are multiplied by the same."""

LEAST_PACKED = 2**16
"""Numbers in the smallest weight that is laid out. Laying out a smaller one takes longer, some tenths of a millisecond,
than a phase of generation gains."""

BLOCK_ROWS = 64
"""Rows of each product by BLAS. Its kernels take up to 8 or 16 rows at once, and a block is a whole number of those."""


class FrozenLinear(Protocol):
    """[rows, inputs] -> [rows, outputs] of their type, not for training."""

    rows_multiple: ClassVar[int]
    """The number of rows must be a multiple of this."""

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
    """The weight, [outputs, inputs], is copied if it is laid out for oneDNN, else read where it is, as the bias,
    [outputs], always is."""
    if weight.numel() < LEAST_PACKED and torch.get_num_threads() == 1:
        return PlainLinear(weight.t(), bias)
    return PackedLinear(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), TYPICAL_ROWS), bias)


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """Implements `FrozenLinear` by torch's own operators."""

    columns: Tensor
    """[inputs, outputs]"""
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
    """Implements `FrozenLinear` by oneDNN's."""

    weight: Tensor
    """In oneDNN's layout."""
    bias: Tensor | None

    rows_multiple: ClassVar[int] = 4

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
