"""Sum of a row-parallel product over tensor-parallel ranks in generation.

Decode steps sum a few rows twice a layer, and NCCL's all-reduce takes some 15 us for them whatever their number. If the
ranks' GPUs are connected by NVLink with multicast, the product is written to memory that all of them map (torch's
symmetric memory), and the switch adds in fp32: some 5 us. Both figures are rules of thumb.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

logger = logging.getLogger(__name__)

SYMMETRIC_BYTES = 8 * 2**20
"""Size of the mapped memory. Larger sums, of prefills, are bound by bandwidth, for which NCCL is made."""


class TensorSum(Protocol):
    def product(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Multiply and sum over the ranks: rows [rows, inputs], weight [outputs, inputs] -> [rows, outputs].

        The result is valid until the next product.
        """


class OneRank:
    def product(self, rows: Tensor, weight: Tensor) -> Tensor:
        return linear(rows, weight)


class CollectiveSum:
    """TensorSum by the all-reduce of the group's backend."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def product(self, rows: Tensor, weight: Tensor) -> Tensor:
        out = linear(rows, weight)
        dist.all_reduce(out, group=self._group)
        return out


class SymmetricSum:
    """TensorSum in memory that all ranks of a group map.

    One buffer is enough: the all-reduce begins and ends with a barrier of the GPUs, and a rank has read the previous
    sum before it writes the next product.
    """

    def __init__(self, buffer: Tensor, group: dist.ProcessGroup) -> None:
        """buffer: [elements] of one dtype, mapped by the group."""
        self._buffer = buffer
        self._group: Any = group
        self._larger = CollectiveSum(group)

    def product(self, rows: Tensor, weight: Tensor) -> Tensor:
        shape = len(rows), len(weight)
        if shape[0] * shape[1] > len(self._buffer):
            return self._larger.product(rows, weight)
        out = self._buffer[: shape[0] * shape[1]].view(shape)
        torch.mm(rows, weight.t(), out=out)
        torch.ops.symm_mem.multimem_all_reduce_(out, "sum", self._group.group_name)
        return out


def tensor_sum(group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device) -> TensorSum:
    """Return the sum over a group of CUDA ranks. Collective, and logs once why memory is not shared."""
    if group.size() == 1:
        return OneRank()
    against = _why_no_multicast(dtype, device)
    if not _all_agree(against is None, group, device):
        logger.info("tensor-parallel sums of generation use NCCL: %s", against or "not all ranks have multicast")
        return CollectiveSum(group)
    buffer, against = _mapped(group, dtype, device)
    if not _all_agree(buffer is not None, group, device):
        logger.info("tensor-parallel sums of generation use NCCL: %s", against or "not all ranks could map memory")
        return CollectiveSum(group)
    assert buffer is not None
    return SymmetricSum(buffer, group)


def _why_no_multicast(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why this rank cannot share memory with others by multicast; None if it can."""
    if dtype not in (torch.bfloat16, torch.float32):
        return f"multicast adds no {dtype}"
    try:
        importlib.import_module("torch.distributed._symmetric_memory")  # defines the operators
        from torch._C._autograd import DeviceType
        from torch._C._distributed_c10d import _SymmetricMemory
    except ImportError as error:
        return f"torch {torch.__version__} has no symmetric memory ({error})"
    if not hasattr(torch.ops.symm_mem, "multimem_all_reduce_"):
        return f"torch {torch.__version__} has no multimem_all_reduce_"
    try:
        found = _SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index or 0)
    except RuntimeError as error:  # of the driver, or for want of one
        return str(error).partition("\n")[0]
    return None if found else "this GPU has no multicast (NVSwitch of an H100 or later)"


def _mapped(group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device) -> tuple[Tensor | None, str | None]:
    """Return memory that the group maps; or why there is none, such as for ranks of several machines."""
    import torch.distributed._symmetric_memory as symmetric

    name: Any = group.group_name
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # later releases no longer need it
            symmetric.enable_symm_mem_for_group(name)
        buffer = symmetric.empty(SYMMETRIC_BYTES // dtype.itemsize, dtype=dtype, device=device)
        handle: Any = symmetric.rendezvous(buffer, name)
    except RuntimeError as error:
        return None, str(error).partition("\n")[0]
    return (buffer, None) if handle.multicast_ptr else (None, "the group's memory has no multicast address")


def _all_agree(mine: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks of the group say yes."""
    votes = torch.tensor(int(mine), device=device)
    dist.all_reduce(votes, dist.ReduceOp.MIN, group=group)
    return bool(votes.item())
