"""Scoring and the loss on a GPU that is not there, and training at full size: shapes, types and devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core_helpers import batch_of, quiet_safe_points, random_groups, tiny_policy, tiny_run
from phantom_gpu import GPU, PhantomGpu, PhantomPlatform

from launcher.plan.gpu_memory import vocabulary
from launcher.recipe.load import load_recipe
from megatron_rl.algorithms.logprobs import token_logprobs
from megatron_rl.algorithms.packing import MicroBatch, pack
from megatron_rl.model.config import Recompute
from megatron_rl.training.batch import training_batch, update_batch
from megatron_rl.training.schedule import ModelInput, forward_backward
from megatron_rl.training.trainer import Trainer


@pytest.mark.parametrize("longest", [7, 200], ids=["trees under a mask", "trees branch by branch"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_scoring_keeps_to_the_gpu_and_looks_at_no_number(platform: Any, groups: Any, dtype: str, longest: int) -> None:
    config = tiny_run(model={"dtype": dtype, "max_position_embeddings": 256}, sampling={"max_new_tokens": 200})
    policy = tiny_policy(platform, config.model)
    rollouts = batch_of(random_groups(4, 4, longest=longest), 0, 4)
    with PhantomGpu() as gpu:
        gpu.move(policy)
        optimizer: Any = None
        trainer = Trainer(policy, optimizer, None, config, PhantomPlatform(), groups, quiet_safe_points())
        batch = training_batch(rollouts.groups, config, 0, GPU)
        inputs = [
            ModelInput.of(policy, micro)
            for micro in update_batch(batch, range(len(batch.trajectories)), config).microbatches
        ]
        scores = trainer.score(policy, batch, inputs)
    assert (scores.device, scores.dtype) == (GPU, torch.float32)
    assert scores.shape == batch.inference_logprobs.shape


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_training_goes_through_at_the_shapes_of_the_largest_recipe(
    platform: Any, groups: Any, recompute: Recompute
) -> None:
    """Two of its layers, all are alike, on one rank: a sequence of full length and eight answers to one prompt."""
    config = load_recipe("qwen2.5-32b-dapo").config
    rows = vocabulary(config)
    assert rows is not None
    model = config.model.model_copy(update={"num_layers": 2})
    prompt, length = 1024, config.sequence_length
    microbatches = [
        *pack([[1] * length], [[False] * prompt + [True] * (length - prompt)], [0], length),
        *pack(
            [[1] * prompt + [answer] * 500 for answer in range(8)],
            [[False] * prompt + [True] * 500] * 8,
            range(8),
            length,
        ),
        MicroBatch.empty(),
    ]
    seen = []

    def loss(logits: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        logprobs, entropy = token_logprobs(logits, micro.targets, temperature=1.0)
        seen.append((tuple(logits.shape), logits.dtype, tuple(logprobs.shape), logprobs.dtype, tuple(entropy.shape)))
        return -logprobs.sum()

    with PhantomGpu() as phantom:
        policy = phantom.policy_of_any_size(model, rows, platform, recompute)
        forward_backward(policy, [ModelInput.of(policy, micro) for micro in microbatches], loss, stop=lambda: False)
    assert seen == [
        ((tokens, rows), torch.bfloat16, (tokens,), torch.float32, (tokens,)) for tokens in (length - prompt, 4000, 0)
    ]
    for name, weight in policy.named_parameters():
        assert weight.grad is not None, name
        assert (weight.grad.shape, weight.grad.dtype) == (weight.shape, torch.bfloat16), name
