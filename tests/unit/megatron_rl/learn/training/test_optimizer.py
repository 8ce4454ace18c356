"""The learning-rate schedule, and Adam's state through save and load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import checkpointer, load, world
from core_helpers import tiny_model, tiny_policy
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.contract.paths import RunDir
from megatron_rl.learn.training.optimizer import PolicyOptimizer
from megatron_rl.recipe.training import OptimizerConfig, learning_rate

# The schedule


def test_the_rate_warms_up_to_its_full_value_in_the_last_warm_up_step() -> None:
    config = OptimizerConfig(learning_rate=0.4, warmup_steps=4)
    assert [learning_rate(done, 100, config) for done in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [1.0, 0.775, 0.55, 0.325, 0.1]),
        ("cosine", [1.0, 0.1 + 0.9 * (2 + 2**0.5) / 4, 0.55, 0.1 + 0.9 * (2 - 2**0.5) / 4, 0.1]),
    ],
)
def test_the_rate_decays_from_its_peak_after_the_warm_up_to_its_minimum_at_the_last_update(
    decay: Any, expected: list[float]
) -> None:
    config = OptimizerConfig(learning_rate=1.0, min_learning_rate=0.1, warmup_steps=2, decay=decay)
    assert [learning_rate(done, 11, config) for done in (2, 4, 6, 8, 10)] == pytest.approx(expected)


@given(
    done=st.integers(0, 200),
    total=st.integers(1, 100),
    warmup=st.integers(0, 120),
    decay=st.sampled_from(["constant", "linear", "cosine"]),
)
def test_the_rate_never_leaves_its_bounds(done: int, total: int, warmup: int, decay: Any) -> None:
    """Includes steps past the end of the schedule, as in an extended run, and a warm-up longer than the run."""
    config = OptimizerConfig(learning_rate=1.0, min_learning_rate=0.1, warmup_steps=warmup, decay=decay)
    rate = learning_rate(done, total, config)
    assert 0 < rate <= 1
    assert rate >= 0.1 or done < warmup
    assert learning_rate(done + 1, total, config) >= rate or done >= warmup
    if warmup + 1 < total and decay != "constant":
        assert learning_rate(warmup, total, config) == 1
        assert learning_rate(total - 1, total, config) == 0.1


# One update


def a_run(platform: Any, **config: Any) -> PolicyOptimizer:
    policy = tiny_policy(platform)
    return PolicyOptimizer(policy, tiny_model(), OptimizerConfig(**({"learning_rate": 1e-2} | config)), 100)


def one_update(optimizer: PolicyOptimizer, number: int) -> Any:
    optimizer.zero_grad()
    loss = torch.zeros(())
    for index, weight in enumerate(optimizer.ddp.module.parameters()):
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1000 * number + index))
        loss = loss + (weight * noise).sum()
    loss.backward()
    return optimizer.update(number)


def weights(optimizer: PolicyOptimizer) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in optimizer.ddp.module.parameters()]


def equal(one: PolicyOptimizer, other: PolicyOptimizer) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_updates_are_those_of_torchs_adam(platform: Any, groups: Any, distributed: bool, weight_decay: float) -> None:
    """Covers clipping, a schedule, and decoupled weight decay without norms and biases, over several updates."""
    config = {"clip_grad": 2.0, "warmup_steps": 3, "weight_decay": weight_decay, "distributed": distributed}
    optimizer = a_run(platform, **config)
    twins = [weight.clone().requires_grad_() for weight in weights(optimizer)]
    decayed = [weight for weight in twins if weight.dim() > 1]
    not_decayed = [weight for weight in twins if weight.dim() == 1]
    adam = torch.optim.AdamW(
        [{"params": decayed}, {"params": not_decayed, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=weight_decay,
    )
    for number in range(5):
        update = one_update(optimizer, number)
        for index, weight in enumerate(twins):
            weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1000 * number + index))
        norm = torch.nn.utils.clip_grad_norm_(twins, 2.0)
        for part in adam.param_groups:
            part["lr"] = 1e-2 * min(1.0, (number + 1) / 3)
        adam.step()
        assert update.applied
        assert update.grad_norm == pytest.approx(norm.item(), rel=1e-5)
        assert update.learning_rate == pytest.approx(adam.param_groups[0]["lr"])
        torch.testing.assert_close(weights(optimizer), [weight.detach() for weight in twins], rtol=1e-5, atol=1e-6)


def test_without_clipping_the_gradient_keeps_its_size(platform: Any, groups: Any) -> None:
    """Adam hides the size in its first update. The second update, after a small gradient, shows it."""
    clipped, whole = a_run(platform, clip_grad=1e-3), a_run(platform, clip_grad=0.0)
    for optimizer in (clipped, whole):
        for number in range(2):
            one_update(optimizer, number)
    assert not equal(clipped, whole)


# Save and load (on several ranks and in other formats: test_checkpoint_layouts.py)


def state_of(optimizer: PolicyOptimizer) -> dict[str, Any]:
    model = optimizer.ddp.module.sharded_state_dict()
    return {"model": model, "optimizer": optimizer.sharded_state(model)}


def resumed(platform: Any, folder: Path, **config: Any) -> PolicyOptimizer:
    """Resume in a new process's optimizer from the checkpoint of step 3, and continue to update 6."""
    optimizer = a_run(platform, **config)
    state, _ = load(RunDir(folder).checkpoint(3), state_of(optimizer), world())
    optimizer.ddp.module.load_state_dict(state["model"])
    optimizer.load_state(state["optimizer"])
    for number in range(3, 6):
        one_update(optimizer, number)
    return optimizer


def undisturbed(platform: Any, folder: Path, **config: Any) -> PolicyOptimizer:
    """Save after update 3, and continue to update 6."""
    optimizer = a_run(platform, **config)
    for number in range(6):
        one_update(optimizer, number)
        if number == 2:
            saver = checkpointer(folder)
            saver.save(3, state_of(optimizer), {})
            saver.wait(final=True)
    return optimizer


@pytest.mark.parametrize("distributed", [True, False])
def test_adam_resumes_where_it_was(platform: Any, groups: Any, tmp_path: Path, distributed: bool) -> None:
    expected = undisturbed(platform, tmp_path, distributed=distributed)
    optimizer = resumed(platform, tmp_path, distributed=distributed)
    assert equal(optimizer, expected)
    for part in optimizer.megatron.chained_optimizers:
        steps = [state["step"] for state in part.optimizer.state.values()]
        assert {float(step) for step in steps} == {6.0}
        assert len({step.data_ptr() for step in steps}) == len(steps) > 1


@pytest.mark.parametrize("distributed", [True, False])
def test_a_new_optimizer_has_a_state_and_unchanged_weights(platform: Any, groups: Any, distributed: bool) -> None:
    """A checkpoint may be due when all updates so far were skipped."""
    optimizer = a_run(platform, distributed=distributed, weight_decay=0.5)
    assert all(torch.equal(a, b) for a, b in zip(weights(optimizer), tiny_policy(platform).parameters(), strict=True))
    state = state_of(optimizer)["optimizer"]
    assert state.pop("step") == 0
    assert len(state) >= 2 * len(weights(optimizer))
    assert all(not piece.data.any() for piece in state.values())


@pytest.mark.parametrize(("in_fp32", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_gradients_of_a_bf16_model_are_summed_in_the_recipes_dtype(
    platform: Any, groups: Any, in_fp32: bool, dtype: torch.dtype
) -> None:
    model = tiny_model(dtype="bf16")
    policy = tiny_policy(platform, model)
    PolicyOptimizer(policy, model, OptimizerConfig(learning_rate=1e-3, grad_reduce_in_fp32=in_fp32), 4)
    assert {weight.main_grad.dtype for weight in policy.parameters()} == {dtype}
