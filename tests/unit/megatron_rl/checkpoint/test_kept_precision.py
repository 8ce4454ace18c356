"""The decay rates of delta nets stay in fp32 in a model in bf16: in updates, and through checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import checkpointer, load, outcome
from core_helpers import stir, tiny_model, tiny_policy
from family_shapes import QWEN35

from megatron_rl.checkpoint.saving_ranks import sharded_weights
from megatron_rl.contract.paths import RunDir
from megatron_rl.learn.training.adam_state import _shares
from megatron_rl.learn.training.optimizer import PolicyOptimizer
from megatron_rl.model.delta_net import GatedDelta
from megatron_rl.model.platform.attention import whole_sequences
from megatron_rl.model.policy import Policy
from megatron_rl.model.trainable import Trainable, load_part
from megatron_rl.recipe.training import OptimizerConfig

MODEL = tiny_model(dtype="bf16", **QWEN35)
RATES = [f"decoder.layers.{number}.self_attention.A_log" for number in (0, 2)]


def trained(platform: Any, updates: int, seed: int, *, distributed: bool = True) -> tuple[Policy, PolicyOptimizer]:
    policy = tiny_policy(platform, MODEL)
    stir(policy, 0.3, seed=seed)
    Trainable.of(MODEL).mark(policy)
    optimizer = PolicyOptimizer(policy, MODEL, OptimizerConfig(learning_rate=1e-4, distributed=distributed), 8)
    for number in range(updates):
        optimizer.zero_grad()
        layout = policy.layout(whole_sequences([5]))
        logits = policy(torch.tensor([3, 10, 4, 12, 7]), torch.arange(5), layout)
        logits.float().square().sum().backward()
        assert optimizer.update(number).applied
    return policy, optimizer


def state_of(policy: Policy, optimizer: PolicyOptimizer, groups: Any) -> dict[str, Any]:
    model = sharded_weights(policy, groups.data_context, groups.expert_data, Trainable.of(MODEL).trained)
    return {"model": model, "optimizer": optimizer.sharded_state(model)}


@pytest.mark.parametrize("distributed", [True, False])
def test_an_update_changes_rates_by_less_than_bf16_could(platform: Any, groups: Any, distributed: bool) -> None:
    before, after = (
        dict(trained(platform, updates, 3, distributed=distributed)[0].named_parameters()) for updates in (0, 1)
    )
    assert [name for name, weight in after.items() if weight.dtype == torch.float32] == RATES
    for name in RATES:
        changes = (after[name] - before[name]).abs()
        assert changes.max() < 2e-4
        assert changes.min() > 5e-5
        assert not torch.equal(after[name].bfloat16().float(), after[name])


def test_a_checkpoint_with_rates_in_bf16_is_read(
    tmp_path: Path, platform: Any, groups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as those of versions that trained all weights in one dtype, with Adam's state."""
    with monkeypatch.context() as patched:
        patched.setattr(GatedDelta, "kept", ())
        old, of_old = trained(platform, 1, seed=3)
        saving = checkpointer(tmp_path)
        saving.save(1, state_of(old, of_old, groups), {})
        outcome(saving)
    policy, optimizer = trained(platform, 0, seed=4)
    found, _ = load(
        RunDir(tmp_path).checkpoint(1), state_of(policy, optimizer, groups), groups.data_context, groups.expert_data
    )
    load_part(policy, found["model"])
    optimizer.load_state(found["optimizer"])
    expected = dict(old.named_parameters())
    for name, weight in policy.named_parameters():
        assert torch.equal(weight, expected[name].to(weight.dtype)), name
    loaded, saved = adam_of(policy, optimizer), adam_of(old, of_old)
    for name, tensors in loaded.items():
        assert tensors.keys() == saved[name].keys() - ({"param"} if name in RATES else set())
        assert all(torch.equal(tensors[kind], saved[name][kind]) for kind in tensors), name


def adam_of(policy: Policy, optimizer: PolicyOptimizer) -> dict[str, dict[str, torch.Tensor]]:
    names = {weight: name for name, weight in policy.named_parameters()}
    shares = (share for part in optimizer._parts() for share in _shares(part, policy.parameters()))
    return {names[share.parameter]: share.tensors for share in shares}
