"""Offloaded state returns to the device bit for bit, and can be saved from host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import checkpointer, load, world
from core_helpers import answer_logprobs, tiny_policy
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from offload_helpers import UPDATES, adams_numbers, an_optimizer, one_update, state_of
from torch import Tensor

from megatron_rl.contract.paths import RunDir
from megatron_rl.learn.training import offload as offload_module
from megatron_rl.learn.training.offload import HostState, HostWeights, WeightsAway
from megatron_rl.learn.training.optimizer import PolicyOptimizer
from megatron_rl.model.platform.phantom import PhantomCuda, PhantomDevice
from megatron_rl.model.trainable import Trainable
from megatron_rl.recipe.job import Offload
from megatron_rl.run.models import Models


def gradient_bytes(optimizer: PolicyOptimizer) -> int:
    return sum(buffer.grad_data.untyped_storage().nbytes() for buffer in optimizer.ddp.buffers)


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("offload", ["buffers", "optimizer"])
def test_updates_with_and_without_offloading_are_equal_bit_for_bit(
    platform: Any, groups: Any, offload: Offload, dtype: str, *, distributed: bool
) -> None:
    usual, offloaded = (an_optimizer(platform, dtype, each, distributed=distributed) for each in ("none", offload))
    whole = gradient_bytes(usual)
    offloaded.offload()
    for number in range(UPDATES):
        for optimizer in (usual, offloaded):
            one_update(optimizer, number)
        assert (gradient_bytes(usual), gradient_bytes(offloaded)) == (whole, 0)
    weights = [list(optimizer.ddp.module.parameters()) for optimizer in (usual, offloaded)]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    expected, found = adams_numbers(usual), adams_numbers(offloaded)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize(("dtype", "per_weight"), [("bf16", 12), ("fp32", 8)])
def test_all_of_adams_state_and_no_weight_of_the_model_is_offloaded(
    platform: Any, groups: Any, dtype: str, per_weight: int
) -> None:
    """Adam in fp32 updates the model's own weights, which generation needs."""
    optimizer = an_optimizer(platform, dtype, "optimizer")
    optimizer.offload()
    weights = list(optimizer.ddp.module.parameters())
    assert optimizer.host_bytes == per_weight * sum(weight.numel() for weight in weights)
    assert all(weight.untyped_storage().nbytes() for weight in weights)
    (part,) = optimizer.megatron.chained_optimizers
    moments = [state[name] for state in part.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert {moment.untyped_storage().nbytes() for moment in moments} == {0}
    optimizer.reload()
    assert {moment.untyped_storage().nbytes() == moment.nbytes for moment in moments} == {True}


@pytest.mark.parametrize("distributed", [True, False])
def test_a_checkpoint_of_offloaded_state_resumes_like_one_of_state_on_the_device(
    platform: Any, groups: Any, tmp_path: Path, *, distributed: bool
) -> None:
    usual = an_optimizer(platform, "bf16", "none", distributed=distributed)
    saved = an_optimizer(platform, "bf16", "optimizer", distributed=distributed)
    for number in range(UPDATES):
        one_update(usual, number)
        if number < 2:
            one_update(saved, number)
    saver = checkpointer(tmp_path)
    saver.save(2, state_of(saved), {})
    saver.wait(final=True)

    resumed = an_optimizer(platform, "bf16", "optimizer", distributed=distributed)
    state, _ = load(RunDir(tmp_path).checkpoint(2), state_of(resumed), world())
    resumed.ddp.module.load_state_dict(state["model"])
    resumed.load_state(state["optimizer"])
    resumed.offload()
    for number in range(2, UPDATES):
        one_update(resumed, number)
    expected, found = adams_numbers(usual), adams_numbers(resumed)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_host_memory_is_allocated_in_blocks_of_a_power_of_two(platform: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exceptions are a tensor larger than a block, and the last block."""
    monkeypatch.setattr(offload_module, "BLOCK_BYTES", 1024)
    taken: list[int] = []

    def host_memory(size: int) -> Tensor:
        taken.append(size)
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(platform, "host_memory", host_memory)
    tensors = [torch.randn(count) for count in (100, 100, 1000, 60, 1, 1)]
    before = [tensor.clone() for tensor in tensors]
    state = HostState(tensors, platform)
    assert taken == [1024, 4032, 384]
    state.offload()
    assert all(torch.equal(state.held(tensor), was) for tensor, was in zip(tensors, before, strict=True))
    state.reload()
    assert all(torch.equal(tensor, was) for tensor, was in zip(tensors, before, strict=True))
    assert state.held(tensors[0]) is tensors[0]


def test_a_gpu_frees_memory_and_waits_once_for_all_copies(platform: Any, groups: Any) -> None:
    with PhantomDevice() as device:
        tensors = [torch.zeros(1000, device=device.device) for _ in range(3)]
        with device.memory.watched() as before:
            pass
        state = HostState(tensors, PhantomCuda(device))
        state.offload()
        assert {state.held(tensor).device.type for tensor in tensors} == {"cpu"}
        with device.memory.watched() as away:
            pass
        state.reload()
        with device.memory.watched() as back:
            pass
        assert (before.bytes, away.bytes, back.bytes) == (12000, 0, 12000)
        assert device.waits == 0


def sharded_of(optimizer: PolicyOptimizer, weights: HostWeights, groups: Any) -> dict[str, Tensor]:
    """Weights and Adam's state, as a checkpoint gets them, copied."""
    policy = optimizer.ddp.module
    models = Models(policy, Trainable(None), optimizer, None, weights, policy.platform, groups)
    state = models.sharded_state()
    tensors = [
        part
        for item in nested_values({"model": state["model"], "optimizer": state["optimizer"]})
        if isinstance(item, ShardedTensor | ShardedTensorFactory)
        for part in (item.build() if isinstance(item, ShardedTensorFactory) else [item])
    ]
    return {f"{part.key} {part.global_offset}": part.data.detach().clone() for part in tensors}


EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 16}


@pytest.mark.parametrize(
    ("dtype", "distributed", "model"),
    [
        pytest.param("bf16", True, {"tied_embeddings": False}, id="views of a buffer"),
        pytest.param("fp32", False, {}, id="tied weights"),
        pytest.param("fp32", True, EXPERTS, id="experts"),
    ],
)
def test_weights_in_host_memory_are_saved_and_come_back_bit_for_bit(
    platform: Any, groups: Any, dtype: str, model: dict[str, Any], *, distributed: bool
) -> None:
    usual, moved = (
        an_optimizer(platform, dtype, each, distributed=distributed, model=model) for each in ("none", "optimizer")
    )
    policy = moved.ddp.module
    weights = HostWeights([policy], platform)
    own = [*policy.parameters()]
    assert weights.bytes >= sum(weight.nbytes for weight in own)
    for number in range(UPDATES):
        one_update(usual, number)
        one_update(moved, number)
        weights.put_away()
        assert {weight.untyped_storage().nbytes() for weight in own} == {0}
        away = sharded_of(moved, weights, groups)
        weights.fetch()
        here = sharded_of(moved, weights, groups)
        assert away.keys() == here.keys()
        assert all(torch.equal(away[name], here[name]) for name in here)
    assert all(map(torch.equal, usual.ddp.module.parameters(), own))


def test_frozen_weights_are_copied_to_host_memory_once(platform: Any, groups: Any) -> None:
    policy = tiny_policy(platform)
    trained, balanced, *frozen = policy.parameters()
    for weight in (balanced, *frozen):
        weight.requires_grad_(False)
    balanced.changes = True  # without a gradient, as correction biases of routers do
    weights = HostWeights([policy], platform)
    before = [weight.detach().clone() for weight in (trained, balanced, *frozen)]
    weights.put_away()
    weights.fetch()
    with torch.no_grad():
        trained.add_(1.0)
        balanced.add_(1.0)
        frozen[0].add_(1.0)  # what nobody does shows that it is not copied again
    weights.put_away()
    weights.fetch()
    assert torch.equal(trained, before[0] + 1.0)
    assert torch.equal(balanced, before[1] + 1.0)
    assert all(map(torch.equal, frozen, before[2:]))


def test_weights_that_are_away_cannot_be_used(platform: Any, groups: Any) -> None:
    policy = tiny_policy(platform)
    weights = HostWeights([policy], platform)
    before = answer_logprobs(policy, [1, 2], [3, 4])
    weights.put_away()
    weights.put_away()
    with pytest.raises(WeightsAway, match="its weights are in host memory"):
        answer_logprobs(policy, [1, 2], [3, 4])
    with pytest.raises(WeightsAway):
        policy.output()
    weights.fetch()
    weights.fetch()
    assert torch.equal(answer_logprobs(policy, [1, 2], [3, 4]), before)
