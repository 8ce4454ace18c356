"""Memory of a bucket is given back on all ways out, on a GPU as on a CPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from bucket_helpers import CPU

from megatron_rl.generate.refit import bucket_memory
from megatron_rl.generate.refit.bucket_memory import allocate, opened
from megatron_rl.generate.refit.epoch import TransferFailed
from megatron_rl.model.platform.libcuda import CudaFailed

GPU = torch.device("cuda", 3)


class Driver:
    """Stands in for CudaMemory of one GPU."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.fails = ""
        self.name = "GPU-1"

    def __call__(self, ordinal: int) -> Driver:
        assert ordinal == 3
        return self

    @property
    def uuid(self) -> str:
        return self._call("uuid", 0, self.name)

    def allocate(self, size: int) -> int:
        return self._call("allocate", size, 0x7F0000000000)

    def free(self, address: int) -> None:
        self._call("free", address, None)

    def export(self, address: int) -> bytes:
        return self._call("export", address, b"handle".ljust(64, b"\0"))

    def open(self, handle: bytes) -> int:
        return self._call("open", handle.rstrip(b"\0"), 0x7E0000000000)

    def close(self, address: int) -> None:
        self._call("close", address, None)

    def _call(self, name: str, argument: Any, result: Any) -> Any:
        self.calls.append((name, argument))
        if name == self.fails:
            raise CudaFailed(f"{name} fails")
        return result


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(bucket_memory, "CudaMemory", driver)
    monkeypatch.setattr(
        bucket_memory, "tensor_at", lambda _address, size, _device: torch.zeros(size, dtype=torch.uint8)
    )
    return driver


def test_memory_of_a_gpu_goes_by_the_handle_of_its_driver(driver: Driver) -> None:
    memory = allocate(4096, GPU)
    assert memory.descriptors == ()
    other = opened(memory.description, [], GPU)
    assert len(other.content) == len(memory.content) == 4096
    other.close()
    memory.close()
    assert [call for call in driver.calls if call[0] != "uuid"] == [
        ("allocate", 4096),
        ("export", 0x7F0000000000),
        ("open", b"handle"),
        ("close", 0x7E0000000000),
        ("free", 0x7F0000000000),
    ]


@pytest.mark.parametrize("fails", ["allocate", "export", "uuid"])
def test_memory_of_a_gpu_that_cannot_be_passed_on_is_freed(fails: str, driver: Driver) -> None:
    driver.fails = fails
    with pytest.raises(TransferFailed, match=rf"no memory for a bucket of 4096 bytes on cuda:3: {fails} fails"):
        allocate(4096, GPU)
    assert [name for name, _ in driver.calls if name == "free"] == ["free"] * (fails != "allocate")


def test_memory_of_another_gpu_is_not_opened(driver: Driver) -> None:
    described = allocate(4096, GPU).description
    driver.name = "GPU-2"
    with pytest.raises(TransferFailed, match="the rank computes on GPU-1 and its worker of vLLM on GPU-2"):
        opened(described, [], GPU)
    assert "open" not in dict(driver.calls)


def test_memory_of_a_cpu_is_shared_and_has_no_name() -> None:
    memory = allocate(1 << 16, CPU)
    files = [Path(f"/proc/self/fd/{each}").readlink() for each in memory.descriptors]
    assert files == [Path("/memfd:mrl-bucket (deleted)")]
    other = opened(memory.description, [os.dup(each) for each in memory.descriptors], CPU)
    memory.content[7] = 3
    assert other.content[7] == 3
    memory.close()
    assert other.content[7] == 3, "what a worker has open stays after the rank has ended"
    other.close()


def test_a_description_that_is_not_one_is_refused_and_its_descriptors_are_closed() -> None:
    reading, writing = os.pipe()
    with pytest.raises(TransferFailed, match="cannot open the bucket of the rank"):
        opened({"bytes": 4096, "device": "the CPU"}, [reading], CPU)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.close(reading)
    os.close(writing)
