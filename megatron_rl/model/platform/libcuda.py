"""Memory that two processes map on one GPU, through CUDA's driver (libcuda).

Handles of torch depend on its release and on its allocator: another process needs the rights of a debugger to open
memory of expandable segments. The driver's own handle of memory that it has allocated depends on neither.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

HANDLE_BYTES = 64
BLOCK_BYTES = 2 << 20
"""The driver takes smaller allocations from a block with others, and a handle shares the whole block, so NVIDIA's guide
recommends multiples of this for memory that is shared."""
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag that cuIpcOpenMemHandle takes


class CudaFailed(RuntimeError):
    """A call of CUDA's driver has failed."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle"""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


def ordinal_of(device: torch.device) -> int:
    """Number of a GPU among those that this process sees."""
    return torch.cuda.current_device() if device.index is None else device.index


class CudaMemory:
    """Memory of one GPU outside of torch's allocator. All methods raise CudaFailed."""

    def __init__(self, ordinal: int, library: Any = None) -> None:
        """
        ordinal: of the GPU among those that this process sees.
        library: libcuda; default: the installed one.
        """
        self._library = library or _libcuda()
        self._device = ctypes.c_int()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(self._device), ordinal)

    @property
    def uuid(self) -> str:
        """Name of the GPU, or of the instance of a divided one, that is the same in all processes."""
        found = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(found), self._device)
        return f"GPU-{uuid.UUID(bytes=bytes(found))}"

    def allocate(self, size: int) -> int:
        """Address of `size` new bytes, which share no block with others."""
        address, whole = ctypes.c_uint64(), -(-size // BLOCK_BYTES) * BLOCK_BYTES
        with self._context():
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(whole))
        return address.value

    def free(self, address: int) -> None:
        """Free allocated memory, which no other process may still have open."""
        with self._context():
            self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def export(self, address: int) -> bytes:
        """Handle of allocated memory with which other processes open it."""
        handle = _Handle()
        with self._context():
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Address, in this process, of memory that another process has exported."""
        address = ctypes.c_uint64()
        given = _Handle.from_buffer_copy(handle)
        with self._context():
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return address.value

    def close(self, address: int) -> None:
        """Close opened memory."""
        with self._context():
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    @contextmanager
    def _context(self) -> Iterator[None]:
        """The context of the GPU that torch uses too, current in this thread."""
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        try:
            self._call("cuCtxPushCurrent_v2", context)
            try:
                yield
            finally:
                self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        finally:
            self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._library, name)(*arguments):
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise CudaFailed(f"{name}: error {code} of CUDA: {(text.value or b'unknown').decode()}")


@cache
def _libcuda() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaFailed(f"CUDA's driver is missing: {error}") from error
