"""A fused policy computes the logits of the training forward."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from core_helpers import tiny_model, tiny_policy

from megatron_rl.model.fused import FusedPolicy, why_not_fused
from megatron_rl.model.platform.attention import whole_sequences
from megatron_rl.model.platform.cpu import CpuDevice, CpuKernels
from megatron_rl.model.platform.layer_kernels import LayerKernels, TorchKernels
from megatron_rl.model.policy import Policy
from megatron_rl.recipe.lora_section import LoraConfig

LENGTHS = [5, 1, 9]


def fusing(kernels: LayerKernels) -> CpuDevice:
    """Return a CPU that generates like a GPU."""
    device, of_device = CpuDevice(threads=1), CpuKernels()
    of_device.computes_on_host, of_device.layer_kernels = False, kernels
    device.kernels = of_device
    return device


@pytest.fixture(params=["torch", "triton"])
def kernels(request: pytest.FixtureRequest) -> Iterator[LayerKernels]:
    if request.param == "torch":
        yield TorchKernels("a test")
        return
    pytest.importorskip("triton")
    yield importlib.import_module("megatron_rl.model.platform.triton_kernels").TritonKernels()


def logits(policy: Policy, forward: Any, select: list[int] | None = None) -> torch.Tensor:
    tokens = torch.arange(sum(LENGTHS)) % 11
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    chosen = None if select is None else torch.tensor(select)
    found: torch.Tensor = forward(tokens, positions, policy.layout(whole_sequences(LENGTHS)), chosen)
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12}},
        {"qkv_bias": False, "qk_norm": True, "tied_embeddings": True},
    ],
    ids=["Qwen2 with YaRN", "Qwen3"],
)
@torch.inference_mode()
def test_logits_are_those_of_the_training_forward(
    platform: Any, groups: Any, kernels: LayerKernels, changes: dict[str, Any]
) -> None:
    policy = tiny_policy(fusing(kernels), tiny_model(**changes))
    fused = policy.frozen()
    assert isinstance(fused, FusedPolicy)
    for select in (None, [3, 14]):
        torch.testing.assert_close(
            logits(policy, fused.logits, select), logits(policy, policy, select), rtol=1e-5, atol=1e-5
        )


@torch.inference_mode()
def test_in_bf16_logits_are_as_exact_as_the_training_forwards(platform: Any, groups: Any) -> None:
    """Uses torch's operators: Triton's interpreter cuts off instead of rounding to bf16."""
    kernels = TorchKernels("a test")
    exact, policy = (tiny_policy(fusing(kernels), tiny_model(dtype=dtype)) for dtype in ("fp32", "bf16"))
    exact.load_state_dict(policy.state_dict())
    fused = policy.frozen()
    assert isinstance(fused, FusedPolicy)
    expected = logits(exact, exact)
    ours, theirs = ((logits(policy, each) - expected).square().mean().sqrt() for each in (fused.logits, policy))
    assert 0 < ours < 1.5 * theirs


@torch.inference_mode()
def test_new_weights_are_used(platform: Any, groups: Any) -> None:
    """Weights change in place; recordings keep their addresses."""
    policy = tiny_policy(fusing(TorchKernels("a test")))
    fused = policy.frozen()
    assert isinstance(fused, FusedPolicy)
    before = logits(policy, fused.logits)
    for weight in policy.parameters():
        weight.mul_(1.1)
    torch.testing.assert_close(logits(policy, fused.logits), logits(policy, policy), rtol=1e-5, atol=1e-5)
    assert (before - logits(policy, fused.logits)).abs().max() > 0.01


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"lora": LoraConfig(rank=2)}, "the model has adapters"),
        ({"attention_sinks": True}, "the model has attention_sinks"),
        ({"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 24}, "the model has experts"),
    ],
)
def test_other_layers_generate_as_they_train(
    platform: Any, groups: Any, changes: dict[str, Any], why: str | None
) -> None:
    policy = tiny_policy(fusing(TorchKernels("a test")), tiny_model(**changes))
    assert why_not_fused(policy, policy.model_config) == why
    assert (policy.frozen() is None) == (why is not None)


def test_a_cpu_generates_with_frozen_weights(platform: Any, groups: Any) -> None:
    assert not isinstance(tiny_policy(platform).frozen(), FusedPolicy)
