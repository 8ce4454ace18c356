"""Calls of CUDA's driver, made to a library in C that keeps a "GPU" in this process's memory: arguments arrive as the
driver declares them, whatever fails the context is left as it was, and errors have the driver's words."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.model.platform.libcuda import BLOCK_BYTES, HANDLE_BYTES, CudaFailed, CudaMemory

COMPILER = shutil.which("cc")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
OUT_OF_MEMORY = 2

# The prototypes are those of cuda.h.
SOURCE = """
#include <stdlib.h>
#include <string.h>
typedef int CUresult; typedef int CUdevice; typedef struct CUctx_st *CUcontext; typedef unsigned long long CUdeviceptr;
typedef struct { char bytes[16]; } CUuuid;
typedef struct { char reserved[64]; } CUipcMemHandle;
int retained, depth, allocated, opened, flags_of_open; size_t last_size; const char *fails = "";
static CUresult call(const char *name) { return strcmp(name, fails) ? 0 : 2; }
#define CALL if (call(__func__)) return 2
#define CURRENT if (!depth) return 201
CUresult cuInit(unsigned int flags) { CALL; return flags ? 1 : 0; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { CALL; *device = 40 + ordinal; return 0; }
CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    CALL; memset(uuid->bytes, 0, 16); uuid->bytes[0] = device; return 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    CALL; retained++; *context = (CUcontext)(size_t)device; return 0; }
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) { CALL; retained--; return device == 43 ? 0 : 1; }
CUresult cuCtxPushCurrent_v2(CUcontext context) { CALL; depth++; return (size_t)context == 43 ? 0 : 1; }
CUresult cuCtxPopCurrent_v2(CUcontext *context) { CALL; depth--; *context = 0; return 0; }
CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size) {
    CALL; CURRENT; allocated++; last_size = size; *address = (CUdeviceptr)(size_t)malloc(size); return 0; }
CUresult cuMemFree_v2(CUdeviceptr address) { CALL; CURRENT; allocated--; free((void *)(size_t)address); return 0; }
CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    CALL; CURRENT; memset(handle, 0, 64); memcpy(handle->reserved + 56, &address, 8); return 0; }
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags) {
    CALL; CURRENT; opened++; flags_of_open = flags; memcpy(address, handle.reserved + 56, 8); return 0; }
CUresult cuIpcCloseMemHandle(CUdeviceptr address) { CALL; CURRENT; opened--; return address ? 0 : 1; }
CUresult cuGetErrorString(CUresult error, const char **text) { *text = "out of memory"; return 0; }
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("libcuda")
    (folder / "cuda.c").write_text(SOURCE)
    assert COMPILER is not None
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "cuda.c"], check=True)
    return folder / "libcuda.so.1"


@pytest.fixture
def library(built: Path) -> Iterator[Any]:
    library = ctypes.CDLL(str(built))
    yield library
    ctypes.c_char_p.in_dll(library, "fails").value = b""
    for name in ("retained", "depth", "allocated", "opened"):
        ctypes.c_int.in_dll(library, name).value = 0


def counts(library: Any) -> dict[str, int]:
    return {name: ctypes.c_int.in_dll(library, name).value for name in ("retained", "depth", "allocated", "opened")}


def test_exported_memory_is_opened_at_the_same_bytes_and_all_is_closed(library: Any) -> None:
    rank, worker = CudaMemory(3, library), CudaMemory(3, library)
    address = rank.allocate(1 << 20)
    handle = rank.export(address)
    assert len(handle) == HANDLE_BYTES
    opened = worker.open(handle)
    assert opened == address != 0
    assert ctypes.c_int.in_dll(library, "flags_of_open").value == 1, "the only flag that the driver takes"
    assert counts(library) == {"retained": 0, "depth": 0, "allocated": 1, "opened": 1}
    worker.close(opened)
    rank.free(address)
    assert counts(library) == dict.fromkeys(("retained", "depth", "allocated", "opened"), 0)


def test_memory_to_share_has_whole_blocks_of_the_driver(library: Any) -> None:
    memory = CudaMemory(3, library)
    for size, whole in ((1, BLOCK_BYTES), (BLOCK_BYTES, BLOCK_BYTES), (BLOCK_BYTES + 1, 2 * BLOCK_BYTES)):
        memory.free(memory.allocate(size))
        assert ctypes.c_size_t.in_dll(library, "last_size").value == whole


def test_a_gpu_has_the_name_that_its_uuid_gives(library: Any) -> None:
    assert CudaMemory(3, library).uuid == "GPU-2b000000-0000-0000-0000-000000000000"


@pytest.mark.parametrize("fails", ["cuMemAlloc_v2", "cuCtxPushCurrent_v2", "cuDevicePrimaryCtxRetain"])
def test_a_call_that_fails_is_named_with_the_words_of_the_driver(fails: str, library: Any) -> None:
    memory = CudaMemory(3, library)
    kept = fails.encode()
    ctypes.c_char_p.in_dll(library, "fails").value = kept
    with pytest.raises(CudaFailed, match=f"{fails}: error {OUT_OF_MEMORY} of CUDA: out of memory"):
        memory.allocate(1 << 20)
    assert counts(library) == dict.fromkeys(("retained", "depth", "allocated", "opened"), 0)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has the driver")
def test_a_machine_without_the_driver_says_so() -> None:
    with pytest.raises(CudaFailed, match=r"CUDA's driver is missing: libcuda\.so\.1"):
        CudaMemory(0)
