"""Tensors whose values move to host memory while the device needs the space, and back for their use.

A tensor and its views keep their identity: only the storage behind them is freed and filled. So megatron-core's
buffers need not be rebuilt, though every weight is a view of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from megatron_rl.model.platform.device import Device

BLOCK_BYTES = 2**30  # size in bytes of host memory blocks: torch rounds pinned allocations up to a power of two
_ALIGNED = 64


class Unused:
    """Tensors whose values are not needed for a while, so that their memory can be freed."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._sizes = [(tensor, tensor.untyped_storage().nbytes()) for tensor in tensors]

    def release(self) -> None:
        """Free the tensors' memory. They must not be used until `restore`."""
        for tensor, _ in self._sizes:
            tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Allocate the tensors' memory again, with arbitrary values."""
        for tensor, size in self._sizes:
            tensor.untyped_storage().resize_(size)


class HostState:
    """Tensors that are either on the device or in host memory, bit for bit. Host memory stays allocated, pinned if the
    device can copy from it directly."""

    def __init__(self, tensors: Sequence[Tensor], platform: Device) -> None:
        self.bytes = sum(tensor.nbytes for tensor in tensors)
        self.away = False  # whether the values are in host memory only
        self._synchronize = platform.synchronize
        self._on_device = Unused(tensors)
        self._copies = list(zip(tensors, _host_copies(tensors, platform.host_memory), strict=True))
        self._copy_of = {id(tensor): copy for tensor, copy in self._copies}

    @torch.no_grad()
    def offload(self) -> None:
        for tensor, copy in self._copies:
            copy.copy_(tensor, non_blocking=True)
        self._synchronize()
        self._on_device.release()
        self.away = True

    @torch.no_grad()
    def reload(self) -> None:
        self._on_device.restore()
        for tensor, copy in self._copies:
            tensor.copy_(copy, non_blocking=True)
        self._synchronize()
        self.away = False

    def held(self, tensor: Tensor) -> Tensor:
        """Return the tensor that holds the values now: `tensor` itself or its copy in host memory."""
        return self._copy_of.get(id(tensor), tensor) if self.away else tensor


def _host_copies(tensors: Sequence[Tensor], host_memory: Callable[[int], Tensor]) -> Iterator[Tensor]:
    """A tensor in host memory for each of `tensors`, of the same shape and dtype."""
    sizes = [-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in tensors]
    missing, block = sum(sizes), torch.empty(0, dtype=torch.uint8)
    for tensor, size in zip(tensors, sizes, strict=True):
        if size > len(block):
            block = host_memory(max(size, min(BLOCK_BYTES, missing)))
        yield block[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        block = block[size:]
        missing -= size
