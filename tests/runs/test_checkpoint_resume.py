"""A resumed run has the same curve as an undisturbed one, bit for bit, with a real model and real optimizers."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import checkpointer, load, run_ranks, world
from megatron.core import parallel_state

from megatron_rl.contract.paths import RunDir
from megatron_rl.learn.training.optimizer import PolicyOptimizer
from megatron_rl.model.platform.select import select
from megatron_rl.model.policy import build_policy
from megatron_rl.recipe.job import JobConfig
from megatron_rl.recipe.model import ModelConfig
from megatron_rl.recipe.training import OptimizerConfig

SAVED, LAST = 3, 7


class Training:
    """Training on a loss that depends on weights, update and rank, so that no error averages out."""

    def __init__(self, rank: int, world_size: int, distributed: bool, dtype: str) -> None:
        parallel_state.initialize_model_parallel()
        self.rank, self.world_size = rank, world_size
        model = ModelConfig(
            num_layers=2,
            hidden_size=32,
            ffn_hidden_size=48,
            num_attention_heads=4,
            num_query_groups=2,
            max_position_embeddings=32,
            vocab_multiple=16,
            dtype=dtype,
            init="from-scratch",
        )
        torch.manual_seed(1)
        self.policy = build_policy(model, 16, select(JobConfig(device="cpu")))
        # No clipping: the norm is summed over shards, so its last bit would depend on the number of ranks.
        config = OptimizerConfig(learning_rate=1e-2, weight_decay=0.01, clip_grad=0.0, distributed=distributed)
        self.optimizer = PolicyOptimizer(self.policy, model, config, LAST)

    def update(self, number: int) -> str:
        """Apply an update, and return a digest of the weights."""
        self.optimizer.zero_grad()
        loss = torch.zeros(())
        for index, weight in enumerate(self.policy.parameters()):
            # The draw is the same for any number of ranks, and each rank takes its share of it.
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(100 * number + index))
            loss = loss + ((weight.float() - 0.1 * noise) ** 2 * noise).sum() / self.world_size
        loss.backward()
        assert self.optimizer.update(number).applied
        digest = hashlib.sha256()
        for weight in self.policy.parameters():
            digest.update(weight.detach().float().numpy().tobytes())
        return digest.hexdigest()

    def state(self) -> dict[str, Any]:
        model = self.policy.sharded_state_dict()
        return {"model": model, "optimizer": self.optimizer.sharded_state(model)}


def _undisturbed(rank: int, world_size: int, folder: Path, distributed: bool, dtype: str) -> list[str]:
    training = Training(rank, world_size, distributed, dtype)
    saver = checkpointer(folder)
    digests = []
    for number in range(LAST):
        digests.append(training.update(number))
        if number + 1 == SAVED:
            saver.save(SAVED, training.state(), {})  # continues during the next updates
    saver.wait(final=True)
    return digests[SAVED:]


def _resumed(
    rank: int, world_size: int, folder: Path, distributed: bool, dtype: str, with_optimizer: bool = True
) -> list[str]:
    training = Training(rank, world_size, distributed, dtype)
    state, _ = load(RunDir(folder).checkpoint(SAVED), training.state(), world())
    training.policy.load_state_dict(state["model"])
    if with_optimizer:
        training.optimizer.load_state(state["optimizer"])
    return [training.update(number) for number in range(SAVED, LAST)]


@pytest.mark.parametrize(("distributed", "dtype"), [(True, "fp32"), (True, "bf16"), (False, "fp32")])
@pytest.mark.parametrize("ranks", [1, 2])
def test_resumed_equals_undisturbed(tmp_path: Path, ranks: int, distributed: bool, dtype: str) -> None:
    undisturbed = run_ranks(tmp_path, ranks, _undisturbed, tmp_path, distributed, dtype)
    assert len(set(undisturbed[0])) == LAST - SAVED
    assert run_ranks(tmp_path, ranks, _resumed, tmp_path, distributed, dtype) == undisturbed


def test_comparison_detects_an_optimizer_that_was_not_loaded(tmp_path: Path) -> None:
    undisturbed = run_ranks(tmp_path, 1, _undisturbed, tmp_path, True, "fp32")
    assert run_ranks(tmp_path, 1, _resumed, tmp_path, True, "fp32", False) != undisturbed


def _whole(training: Training) -> list[torch.Tensor]:
    """Weights of the policy and, on rank 0 only, Adam's fp32 weights and both moments, gathered from all ranks without
    padding."""
    tensors = [weight.detach().clone() for weight in training.policy.parameters()]
    for part in training.optimizer.megatron.chained_optimizers:
        for buffer in (part.get_parameter_state_dp_zero(use_gloo_comm=False) or {}).values():
            if isinstance(buffer, dict):
                for state in buffer.values():
                    tensors += [state[name].clone() for name in ("param", "exp_avg", "exp_avg_sq")]
    assert training.rank > 0 or len(tensors) > len(list(training.policy.parameters()))
    return tensors


def _save_whole(rank: int, world_size: int, folder: Path) -> list[torch.Tensor]:
    training = Training(rank, world_size, True, "bf16")
    for number in range(SAVED):
        training.update(number)
    saver = checkpointer(folder)
    saver.save(SAVED, training.state(), {})
    saver.wait(final=True)
    return _whole(training)


def _load_whole(rank: int, world_size: int, folder: Path) -> list[torch.Tensor]:
    training = Training(rank, world_size, True, "bf16")
    state, _ = load(RunDir(folder).checkpoint(SAVED), training.state(), world())
    training.policy.load_state_dict(state["model"])
    training.optimizer.load_state(state["optimizer"])
    return _whole(training)


@pytest.mark.parametrize(("save_ranks", "load_ranks"), [(2, 1), (1, 2), (2, 3), (3, 2)])
def test_weights_and_adam_state_have_the_same_bits_on_another_number_of_ranks(
    tmp_path: Path, save_ranks: int, load_ranks: int
) -> None:
    saved = run_ranks(tmp_path, save_ranks, _save_whole, tmp_path)[0]
    for rank, loaded in enumerate(run_ranks(tmp_path, load_ranks, _load_whole, tmp_path)):
        assert len(loaded) == len(saved) or rank > 0
        assert all(one.abs().sum() > 0 for one in saved)
        for one, other in zip(saved, loaded, strict=rank == 0):
            assert torch.equal(one, other)


@pytest.mark.parametrize(("save_ranks", "load_ranks"), [(1, 2), (2, 1)])
def test_run_resumes_alike_on_another_number_of_ranks(tmp_path: Path, save_ranks: int, load_ranks: int) -> None:
    """The loss is the same on all ranks, and adding two halves is exact, so the bits are the same too."""
    (undisturbed, *_) = run_ranks(tmp_path, save_ranks, _undisturbed, tmp_path, True, "fp32")
    for resumed in run_ranks(tmp_path, load_ranks, _resumed, tmp_path, True, "fp32"):
        assert resumed == undisturbed
