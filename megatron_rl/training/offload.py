"""Tensors whose numbers are in the host's memory while the device needs the room, and on the device for their use.

A tensor and all views of it stay what they are, whoever holds them: what goes and comes is the storage behind them. So
megatron-core's buffers, of which every weight has a piece, need not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from megatron_rl.platform.api import Platform

BLOCK_BYTES = 2**30
"""Host memory is taken in blocks of this size: torch rounds what it pins up to a power of two."""
_ALIGNED = 64


class Unused:
    """Tensors whose numbers nobody needs for a while: their memory is free meanwhile."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """tensors: each with a storage of its own."""
        self._sizes = [(tensor, tensor.untyped_storage().nbytes()) for tensor in tensors]

    def release(self) -> None:
        """Free their memory; they must not be read or written until `restore`."""
        for tensor, _ in self._sizes:
            tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Give them memory again, whose content is arbitrary."""
        for tensor, size in self._sizes:
            tensor.untyped_storage().resize_(size)


class HostState:
    """Tensors that are on the device or in the host's memory, bit for bit. Each has its place there for good, pinned
    where the device copies by itself."""

    def __init__(self, tensors: Sequence[Tensor], platform: Platform) -> None:
        """tensors: each contiguous, with a storage of its own, on the device."""
        self.bytes = sum(tensor.nbytes for tensor in tensors)
        self.away = False
        """Whether their numbers are in the host's memory, and no longer on the device."""
        self._synchronize = platform.synchronize
        self._on_device = Unused(tensors)
        self._copies = list(zip(tensors, _places(tensors, platform.host_memory), strict=True))
        self._place = {id(tensor): place for tensor, place in self._copies}

    @torch.no_grad()
    def offload(self) -> None:
        """Take them to the host's memory, and free theirs on the device."""
        for tensor, place in self._copies:
            place.copy_(tensor, non_blocking=True)
        self._synchronize()
        self._on_device.release()
        self.away = True

    @torch.no_grad()
    def reload(self) -> None:
        """Bring them back."""
        self._on_device.restore()
        for tensor, place in self._copies:
            tensor.copy_(place, non_blocking=True)
        self._synchronize()
        self.away = False

    def held(self, tensor: Tensor) -> Tensor:
        """The tensor's numbers, wherever they are now: itself, or its place in the host's memory."""
        return self._place.get(id(tensor), tensor) if self.away else tensor


def _places(tensors: Sequence[Tensor], host_memory: Callable[[int], Tensor]) -> Iterator[Tensor]:
    """A tensor in the host's memory for each, of its shape and type."""
    sizes = [-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in tensors]
    missing, block = sum(sizes), torch.empty(0, dtype=torch.uint8)
    for tensor, size in zip(tensors, sizes, strict=True):
        if size > len(block):
            block = host_memory(max(size, min(BLOCK_BYTES, missing)))
        yield block[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        block = block[size:]
        missing -= size
