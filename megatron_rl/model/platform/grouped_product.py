"""Products of rows with one matrix for each group of rows, all in one kernel: of tokens with the experts that they go
to.

torch's grouped product reads the sizes of the groups on the device. So the host neither waits for them nor launches a
product for each expert, and a decode step can be recorded: the number of rows is the same for any routing.

Weights stay one parameter for each expert. The kernel needs one tensor, which is a view where the parameters lie at
equal distances in one storage, and a copy otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

MULTIPLE = 8
"""Divisor of the inputs and outputs of a product: the kernel reads rows of bf16 in units of 16 bytes."""


def find_grouped_product() -> Callable[..., Tensor] | None:
    """torch's grouped product; None before torch 2.8."""
    public: Callable[..., Tensor] | None = getattr(torch.nn.functional, "grouped_mm", None)  # since 2.10
    return public or getattr(torch, "_grouped_mm", None)


def against_grouped_products(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a GPU multiplies experts one by one; None if it multiplies all at once."""
    if find_grouped_product() is None:
        return f"torch {torch.__version__} has no grouped product: 2.8 is the first that has"
    if dtype != torch.bfloat16:
        return f"the grouped product needs bf16, and the model is {str(dtype).removeprefix('torch.')}"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 9:
        return f"this GPU has compute capability {major}.{minor}, and the grouped product needs 9.0 (H100)"
    return None


def grouped_linear(rows: Tensor, ends: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Multiply each group of rows by the transpose of the group's weight.

    Args:
        rows: [rows, inputs], one group after another; groups may be empty.
        ends: [groups] int32, on the device of the rows: number of rows up to the end of each group.
        weights: [outputs, inputs] of each group.

    Returns [rows, outputs].
    """
    result: Tensor = _GroupedLinear.apply(rows, ends, *weights)
    return result


def rows_of_groups(count: int, ends: Tensor, vectors: Sequence[Tensor]) -> Tensor:
    """[count, outputs]: for each row the vector of its group. Their gradients are sums over the rows, in a fixed order.

    ends: see `grouped_linear`. vectors: [outputs] of each group.
    """
    result: Tensor = _RowsOfGroups.apply(count, ends, *vectors)
    return result


def as_one(tensors: Sequence[Tensor]) -> Tensor:
    """[groups, ...] tensor of equal tensors: a view if they lie at equal distances, in this order, in one storage."""
    first = tensors[0]
    storage, offset = first.untyped_storage()._cdata, first.storage_offset()
    step = tensors[1].storage_offset() - offset if len(tensors) > 1 else first.numel()
    in_place = step >= first.numel() and all(
        each.untyped_storage()._cdata == storage and each.storage_offset() == offset + number * step
        for number, each in enumerate(tensors)
    )
    if in_place and first.is_contiguous():
        return first.as_strided((len(tensors), *first.shape), (step, *first.stride()), offset)
    return torch.stack([*tensors])


@torch.no_grad()
def put_in_one_storage(parameters: Sequence[Tensor]) -> None:
    """Move equal parameters into one storage, one after another, so that `as_one` need not copy them."""
    for parameter, place in zip(parameters, torch.stack([*parameters]).unbind(), strict=True):
        parameter.data = place


class _GroupedLinear(torch.autograd.Function):
    """Keeps the rows for the backward pass, and of the weights only the parameters."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, ends, *weights)
        return _product(rows, as_one(weights).transpose(1, 2), ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, ends, *weights = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        of_rows = of_weights = None
        if ctx.needs_input_grad[0]:
            of_rows = _product(gradient, as_one(weights), ends)
        if any(ctx.needs_input_grad[2:]):
            of_weights = _sums(gradient, rows, ends)
        return of_rows, None, *(of_weights.unbind() if of_weights is not None else [None] * len(weights))


class _RowsOfGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, ends: Tensor, *vectors: Tensor) -> Tensor:
        ctx.save_for_backward(ends)
        groups = torch.searchsorted(ends, torch.arange(count, device=ends.device).int(), right=True)
        return torch.stack(vectors).index_select(0, groups)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (ends,) = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        ones = gradient.new_ones(len(gradient), MULTIPLE)  # equal columns, because the kernel has no narrower product
        return None, None, *_sums(gradient, ones, ends)[..., 0].unbind()


def _sums(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """[rows, outputs], [rows, inputs] -> [groups, outputs, inputs]: sum of the products of each group's rows."""
    sums = _product(gradient.t(), rows, ends)
    # Kernels differ in whether they write the sum of an empty group.
    begins = torch.cat((ends.new_zeros(1), ends[:-1]))
    return sums.masked_fill_((ends == begins)[:, None, None], 0)


def _product(first: Tensor, second: Tensor, ends: Tensor) -> Tensor:
    """[rows, n] by [groups, n, m] -> [rows, m], or [n, rows] by [rows, m] -> [groups, n, m]."""
    if 0 in first.shape:  # kernels refuse empty tensors
        groups = () if second.dim() == 3 else (len(ends),)
        return first.new_zeros(*groups, first.shape[0], second.shape[-1])
    product = find_grouped_product()
    assert product is not None, "against_grouped_products was not asked"
    return product(first, second, offs=ends)
