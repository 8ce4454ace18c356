"""Scoring and a pass over experts on a phantom GPU: shapes, dtypes, devices and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core_helpers import VOCAB, batch_of, here_of, random_groups, tiny_model, tiny_run

from megatron_rl.algorithms.packing import pack
from megatron_rl.learn.training.objective import Grpo
from megatron_rl.learn.training.schedule import ModelInput, Pipeline, forward_backward
from megatron_rl.learn.training.trainer import Trainer
from megatron_rl.learn.training.training_batch import training_batch, update_part
from megatron_rl.model.platform.phantom import PhantomCuda, PhantomDevice
from megatron_rl.model.policy import build_policy
from megatron_rl.recipe.model import Recompute
from megatron_rl.run.rehearse.phantom_world import balanced_routing

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("longest", [7, 200], ids=["trees under a mask", "trees branch by branch"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_scoring_stays_on_the_gpu_and_reads_no_value(platform: Any, groups: Any, dtype: str, longest: int) -> None:
    config = tiny_run(
        model={"dtype": dtype, "head_dim": 16, "max_position_embeddings": 256}, sampling={"max_new_tokens": 200}
    )
    rollouts = batch_of(random_groups(4, 4, longest=longest), 0, 4)
    with PhantomDevice(GPU) as gpu:
        platform = PhantomCuda(gpu)
        policy = build_policy(config.model, VOCAB, platform)
        optimizer: Any = None
        here = here_of(platform, groups)
        trainer = Trainer(policy, optimizer, Grpo(config, policy, None), config, here)
        batch = training_batch(rollouts.groups, trainer.objective.credit(rollouts.groups), config, 0, GPU)
        part = update_part(batch, range(len(batch.sequences)), config, platform.kernels)
        inputs = [ModelInput.of(policy, part.packing.microbatch(names)) for names in part.bins]
        scores = trainer.score(policy, batch, inputs)
    assert (scores.device, scores.dtype) == (GPU, torch.float32)
    assert scores.shape == batch.inference_logprobs.shape


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_only_gradients_and_routing_remain_after_a_pass_over_experts(
    platform: Any, groups: Any, recompute: Recompute
) -> None:
    """Attention and linears alone would keep hundreds of bytes per token."""
    model = tiny_model(
        num_experts=4, experts_per_token=2, expert_ffn_hidden_size=16, qkv_bias=False, dtype="bf16", head_dim=16
    )
    length = model.max_position_embeddings
    with PhantomDevice() as device, balanced_routing():

        def held() -> int:
            with device.memory.watched() as now:
                return now.bytes

        policy = build_policy(model, VOCAB, PhantomCuda(device), recompute)
        inputs = [
            ModelInput.of(policy, micro)
            for micro in pack([[1] * length], [[False] + [True] * (length - 1)], [0], length)
        ]
        before = held()
        forward_backward(policy, inputs, lambda hidden, _: hidden.float().sum(), Pipeline(), stop=lambda: False)
        gradients = sum(weight.grad.nbytes for weight in policy.parameters() if weight.grad is not None)
        assert held() - before - gradients <= 32 * length * model.num_layers
