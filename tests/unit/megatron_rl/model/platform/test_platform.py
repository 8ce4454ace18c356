"""The CPU replaces CUDA in megatron-core, and unsupported machines are reported at the start."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from megatron.core.optimizer import clip_grads

from megatron_rl.model.platform import cpu, cuda
from megatron_rl.model.platform.cuda import CudaDevice
from megatron_rl.model.platform.device import DeviceUse, UnsupportedPlatform
from megatron_rl.model.platform.implementation import TRANSFORMER_ENGINE, Implementation
from megatron_rl.model.platform.select import check_megatron_version, select
from megatron_rl.recipe.job import JobConfig


@pytest.mark.parametrize("version", ["0.16.1", "0.17.0", "0.19.2", "0.19.0rc1", "0.16.1+local"])
def test_supported_versions_pass(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    check_megatron_version()


@pytest.mark.parametrize("version", ["0.16.0", "0.9.0", "0.20.0", "1.0.0"])
def test_any_other_version_says_what_to_install(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    with pytest.raises(UnsupportedPlatform, match=rf"megatron-core {version} .*install 'megatron-core>=0.16.1,<0.20'"):
        select(JobConfig(device="cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_recipe_for_cuda_without_a_gpu_says_so() -> None:
    with pytest.raises(UnsupportedPlatform, match=r"torch sees no GPU.*job\.device=cpu"):
        select(JobConfig(device="cuda"))


def test_the_generator_state_comes_back(platform: Any, groups: Any) -> None:
    platform.seed(3)
    state = platform.rng_state()
    drawn = torch.rand(5)
    platform.set_rng_state(state)
    assert torch.equal(torch.rand(5), drawn)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    """Device of a machine whose CUDA is a stand-in."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    torch.set_float32_matmul_precision("high")
    return CudaDevice(local_rank=0, threads=1)


def test_a_gpu_computes_fp32_without_tf32_and_loads_a_checkpoint_of_a_cpu(gpu: CudaDevice) -> None:
    """NVIDIA's image allows TF32. A checkpoint has the generator states of the device that wrote it."""
    assert torch.get_float32_matmul_precision() == "highest"
    gpu.set_rng_state({"cpu": torch.get_rng_state()})


@pytest.mark.parametrize(("capability", "fits"), [((8, 0), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)])
def test_fp8_is_refused_on_a_gpu_without_it(
    gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], fits: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA X")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    asked = Implementation(TRANSFORMER_ENGINE, "", "hybrid")
    if fits:
        assert CudaDevice(local_rank=0, threads=1, made_of=asked).kernels.made_of is asked
    else:
        with pytest.raises(
            UnsupportedPlatform, match=r"training\.fp8 is hybrid, but NVIDIA X has compute capability 8\.0"
        ):
            CudaDevice(local_rank=0, threads=1, made_of=asked)
    assert CudaDevice(local_rank=0, threads=1)


def test_heads_that_flex_attention_does_not_support_are_refused(gpu: CudaDevice) -> None:
    """The demo's have 16, those of most tests 8."""
    assert gpu.kernels.linears(cast(Any, SimpleNamespace(kv_channels=16, tensor_model_parallel_size=2))) is None
    with pytest.raises(UnsupportedPlatform, match=r"model\.head_dim is 8 .*, and attention on a GPU needs 16 or more"):
        gpu.kernels.linears(cast(Any, SimpleNamespace(kv_channels=8)))


class NvmlError(Exception):
    """Stand-in for NVML's error, which is not a RuntimeError."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Calls of the stand-ins for torch.cuda and NVML, the first one first."""
    calls: list[str] = []

    def answer(name: str, value: Any) -> None:
        monkeypatch.setattr(torch.cuda, name, lambda device: (calls.append(name), value)[1])

    answer("max_memory_allocated", 3 * 2**30)
    answer("reset_peak_memory_stats", None)
    answer("power_draw", 412_500)  # milliwatts
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=NvmlError))
    cuda._nvml.cache_clear()
    yield calls
    cuda._nvml.cache_clear()


def test_a_gpu_reports_its_peak_memory_since_the_last_query_and_its_power(gpu: CudaDevice, asked: list[str]) -> None:
    assert gpu.device_use() == DeviceUse(peak_memory=3 * 2**30, power=412.5)
    assert asked == ["max_memory_allocated", "reset_peak_memory_stats", "power_draw"]


def test_without_nvml_the_power_is_unknown_and_not_asked_for(
    gpu: CudaDevice, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if it were not installed
    assert gpu.device_use() == DeviceUse(peak_memory=3 * 2**30, power=None)
    assert "power_draw" not in asked


@pytest.mark.parametrize("error", [NvmlError("Not Supported"), RuntimeError("cuda driver can't be loaded")])
def test_a_driver_without_power_readings_leaves_the_power_unknown(
    gpu: CudaDevice, asked: list[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(device: torch.device) -> int:
        raise error

    monkeypatch.setattr(torch.cuda, "power_draw", fails)
    assert gpu.device_use() == DeviceUse(peak_memory=3 * 2**30, power=None)


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA A100-SXM4-40GB", "bf16", 312e12),
        ("NVIDIA H100 80GB HBM3", "fp32", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
        ("NVIDIA GeForce RTX 4090", "bf16", None),
    ],
)
def test_the_peak_of_a_gpu_follows_from_its_name_and_is_known_only_for_bf16(
    gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str, peak: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert gpu.peak_flops(dtype) == peak


def test_torch_itself_is_not_patched(platform: Any) -> None:
    """Only megatron-core believes that the CPU is a GPU."""
    assert torch.zeros(1).device.type == "cpu"
    assert not torch.zeros(1).is_cuda
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AssertionError), match=r"CUDA|NVIDIA|cuda"):
            torch.zeros(1, device="cuda")


def test_a_missing_patched_symbol_is_one_clear_error(platform: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_MODULES_NAMING_CUDA", {"megatron.core.optimizer.clip_grads": "the gradient norm"})
    monkeypatch.delattr(clip_grads, "torch")
    with pytest.raises(UnsupportedPlatform, match="install a supported version") as refused:
        cpu.install_patches.__wrapped__()  # the cached function has run in this process already
    missing = "megatron.core.optimizer.clip_grads.torch, which the CPU platform patches, is missing"
    assert str(refused.value).startswith(missing)
