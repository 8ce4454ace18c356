"""The CPU stands in for CUDA where megatron-core names it, and what is not supported is said at start."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest
import torch
from megatron.core.optimizer import clip_grads

from megatron_rl.errors import ConfigurationError
from megatron_rl.platform import cpu
from megatron_rl.platform.api import UnsupportedPlatform
from megatron_rl.platform.cuda import CudaPlatform
from megatron_rl.platform.select import check_megatron_version, select
from megatron_rl.rank.config import JobConfig


@pytest.mark.parametrize("version", ["0.16.1", "0.17.0", "0.19.2", "0.19.0rc1", "0.16.1+local"])
def test_supported_versions_pass(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    check_megatron_version()


@pytest.mark.parametrize("version", ["0.16.0", "0.9.0", "0.20.0", "1.0.0"])
def test_any_other_version_says_what_to_install(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    with pytest.raises(UnsupportedPlatform, match=rf"megatron-core {version} .*install 'megatron-core>=0.16.1,<0.20'"):
        select(JobConfig(device="cpu"))


def test_it_is_a_configuration_error() -> None:
    """So a rank ends with the code that is never retried."""
    assert issubclass(UnsupportedPlatform, ConfigurationError)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_recipe_for_cuda_without_a_gpu_says_so() -> None:
    with pytest.raises(UnsupportedPlatform, match=r"torch sees no GPU.*job\.device=cpu"):
        select(JobConfig(device="cuda"))


def test_threads_are_the_recipes(platform: Any) -> None:
    assert platform.device == torch.device("cpu")
    assert platform.backend == "gloo"
    assert torch.get_num_threads() == 1


def test_the_generator_state_comes_back(platform: Any, groups: Any) -> None:
    platform.seed(3)
    state = platform.rng_state()
    drawn = torch.rand(5)
    platform.set_rng_state(state)
    assert torch.equal(torch.rand(5), drawn)


def test_fp32_on_a_gpu_is_fp32_and_a_checkpoint_of_a_cpu_loads_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's image allows TF32; a checkpoint has the generators of the device that wrote it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    torch.set_float32_matmul_precision("high")
    gpu = CudaPlatform(local_rank=0, threads=1)
    assert torch.get_float32_matmul_precision() == "highest"
    gpu.set_rng_state({"cpu": torch.get_rng_state()})


def test_all_of_torch_stays_as_it_was(platform: Any) -> None:
    """Outside megatron-core nothing believes that the CPU is a GPU."""
    assert torch.zeros(1).device.type == "cpu"
    assert not torch.zeros(1).is_cuda
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AssertionError), match=r"CUDA|NVIDIA|cuda"):
            torch.zeros(1, device="cuda")


def test_a_patched_symbol_that_is_gone_is_one_clear_error(platform: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_MODULES_NAMING_CUDA", {"megatron.core.optimizer.clip_grads": "the gradient norm"})
    monkeypatch.delattr(clip_grads, "torch")
    with pytest.raises(UnsupportedPlatform, match="install a supported version") as refused:
        cpu.install_patches.__wrapped__()  # that of this process has long been done, and is done once
    gone = "megatron.core.optimizer.clip_grads.torch, which the CPU platform patches, is gone"
    assert str(refused.value).startswith(gone)
