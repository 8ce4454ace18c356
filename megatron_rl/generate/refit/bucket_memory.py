"""Memory of a bucket, which a training rank allocates and its worker of vLLM opens: on a GPU, memory of the driver that
goes by a handle; on a CPU, memory without a name that goes as a file descriptor. Both end with the processes that have
them, so nothing stays behind."""

from __future__ import annotations

import mmap
import os
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_rl.generate.refit.epoch import TransferFailed
from megatron_rl.model.platform.libcuda import CudaFailed, CudaMemory, ordinal_of


class SharedMemory(Protocol):
    content: Tensor
    """[bytes] uint8, on the device."""

    def close(self) -> None:
        """Give the memory back. `content` and views of it may not be used afterwards. In the rank: once the worker has
        closed it."""


class AllocatedMemory(SharedMemory, Protocol):
    descriptors: tuple[int, ...]
    """File descriptors with which the worker opens it."""
    description: dict[str, Any]
    """Everything else that the worker needs, as JSON."""


def allocate(size: int, device: torch.device) -> AllocatedMemory:
    """Allocate memory of a bucket on a rank's device. Raises TransferFailed."""
    try:
        return _AllocatedGpuMemory(size, device) if device.type == "cuda" else _AllocatedHostMemory(size)
    except (CudaFailed, OSError) as error:
        raise TransferFailed(f"no memory for a bucket of {size} bytes on {device}: {error}") from error


def opened(description: dict[str, Any], descriptors: list[int], device: torch.device) -> SharedMemory:
    """Open the memory that a rank has allocated. This closes the descriptors.

    device: of the worker. Raises TransferFailed, also if the memory is on another device.
    """
    try:
        size, theirs = int(description["bytes"]), str(description["device"])
        if (ours := device_name(device)) != theirs:
            raise TransferFailed(
                f"the rank computes on {theirs} and its worker of vLLM on {ours}: the front of the replica must see "
                "exactly the devices of its training ranks, in their order"
            )
        if device.type == "cuda":
            return _OpenedGpuMemory(size, bytes.fromhex(str(description["handle"])), device)
        (descriptor,) = descriptors
        return _OpenedHostMemory(size, descriptor)
    except (CudaFailed, OSError, KeyError, ValueError) as error:
        raise TransferFailed(f"cannot open the bucket of the rank: {error!r}") from error
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def device_name(device: torch.device) -> str:
    """Name of a device that is the same in all processes. Raises CudaFailed."""
    return CudaMemory(ordinal_of(device)).uuid if device.type == "cuda" else "the CPU"


class _OpenedHostMemory:
    def __init__(self, size: int, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, size)
        self.content = torch.frombuffer(self._map, dtype=torch.uint8)

    def close(self) -> None:
        del self.content  # a map with views of it stays until the last of them is gone


class _AllocatedHostMemory(_OpenedHostMemory):
    def __init__(self, size: int) -> None:
        descriptor = os.memfd_create("mrl-bucket")
        try:
            os.posix_fallocate(descriptor, 0, size)  # otherwise a write without memory left kills the process
            super().__init__(size, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self.descriptors: tuple[int, ...] = (descriptor,)
        self.description: dict[str, Any] = {"device": device_name(torch.device("cpu")), "bytes": size}

    def close(self) -> None:
        super().close()
        os.close(*self.descriptors)


class _OpenedGpuMemory:
    def __init__(self, size: int, handle: bytes, device: torch.device) -> None:
        self._memory = CudaMemory(ordinal_of(device))
        self._address = self._memory.open(handle)
        self.content = tensor_at(self._address, size, device)

    def close(self) -> None:
        del self.content
        self._memory.close(self._address)


class _AllocatedGpuMemory:
    descriptors: tuple[int, ...] = ()

    def __init__(self, size: int, device: torch.device) -> None:
        self._memory = CudaMemory(ordinal_of(device))
        self._address = self._memory.allocate(size)
        try:
            handle = self._memory.export(self._address)
            self.description: dict[str, Any] = {
                "device": self._memory.uuid,
                "bytes": size,
                "handle": handle.hex(),
            }
            self.content = tensor_at(self._address, size, device)
        except BaseException:
            self._memory.free(self._address)
            raise

    def close(self) -> None:
        del self.content
        self._memory.free(self._address)


class _AtAddress:
    """Bytes on a GPU, in the form in which Python's libraries exchange them."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def tensor_at(address: int, size: int, device: torch.device) -> Tensor:
    """[size] Bytes at an address of a GPU as a tensor, which does not own them."""
    return torch.as_tensor(_AtAddress(address, size), device=device)
