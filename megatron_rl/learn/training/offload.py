"""Tensors whose values move to host memory while the device needs the space, and back for their use.

A tensor and its views keep their identity: only the storage behind them is freed and filled. So megatron-core's
buffers need not be rebuilt, though every weight is a view of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Module

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

    def __init__(self, tensors: Sequence[Tensor], platform: Device, *, constant: bool = False) -> None:
        """constant: whether the values never change, so that they are copied to host memory only once."""
        self.bytes = sum(tensor.nbytes for tensor in tensors)
        self.away = False  # whether the values are in host memory only
        self._synchronize = platform.synchronize
        self._constant, self._copied = constant, False
        self._on_device = Unused(tensors)
        self._copies = list(zip(tensors, _host_copies(tensors, platform.host_memory), strict=True))
        self._copy_of = {id(tensor): copy for tensor, copy in self._copies}

    @torch.no_grad()
    def offload(self) -> None:
        if not (self._constant and self._copied):
            for tensor, copy in self._copies:
                copy.copy_(tensor, non_blocking=True)
            self._copied = True
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


class WeightsAway(RuntimeError):
    """Weights were about to be used while they are in host memory."""


class HostWeights:
    """Weights of models, all on the device or all in host memory; those without gradients, or the mark
    `changes`, never change. While they are away, a module that computes with them raises WeightsAway."""

    # Weights share storages: megatron-core's distributed optimizer makes all of them views of a few buffers, and tied
    # ones are one tensor. So whole storages move, and a weight in host memory is the same view of the storage's copy.

    def __init__(self, models: Sequence[Module], platform: Device) -> None:
        self._modules = [
            module for model in models for module in model.modules() if any(True for _ in module.parameters(False))
        ]
        weights = [(weight.untyped_storage()._cdata, weight) for model in models for weight in model.parameters()]
        self._whole = {
            key: torch.empty(0, dtype=torch.uint8, device=weight.device).set_(weight.untyped_storage())
            for key, weight in dict(weights).items()
        }
        trained = {key for key, weight in weights if weight.requires_grad or getattr(weight, "changes", False)}
        self._trained = HostState([whole for key, whole in self._whole.items() if key in trained], platform)
        frozen = [whole for key, whole in self._whole.items() if key not in trained]
        self._frozen = HostState(frozen, platform, constant=True)
        self._held: dict[int, tuple[Tensor, Tensor]] = {}  # weight -> itself, and its copy
        self._guards: list[Any] = []

    @property
    def bytes(self) -> int:
        return self._trained.bytes + self._frozen.bytes

    @property
    def away(self) -> bool:
        return self._trained.away

    def put_away(self) -> None:
        """Move the weights to host memory. No-op for weights that are there."""
        if not self.away:
            self._trained.offload()
            self._frozen.offload()
            self._guards = [module.register_forward_pre_hook(_refuse) for module in self._modules]

    def fetch(self) -> None:
        """Move the weights to the device. No-op for weights that are there."""
        if self.away:
            self._trained.reload()
            self._frozen.reload()
            for guard in self._guards:
                guard.remove()
            self._held.clear()

    def held(self, tensor: Tensor) -> Tensor:
        """Return the tensor that holds the values of a weight, or of a view of it, now; the same one each time. Returns
        other tensors as they are."""
        if not self.away:
            return tensor
        if id(tensor) in self._held:
            return self._held[id(tensor)][1]
        whole = self._whole.get(tensor.untyped_storage()._cdata)
        if whole is None:
            return tensor
        copy = self._frozen.held(self._trained.held(whole)).view(tensor.dtype)
        offset = copy.storage_offset() + tensor.storage_offset()
        found = copy.as_strided(tensor.shape, tensor.stride(), offset)
        self._held[id(tensor)] = tensor, found
        return found


def _refuse(module: Module, _inputs: Any) -> NoReturn:
    raise WeightsAway(
        f"{type(module).__name__} is used while its weights are in host memory, because an engine generates on this "
        "device (placement.offload optimizer)"
    )


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
