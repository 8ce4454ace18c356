"""Scoring and the loss on a phantom GPU, and training at full size: shapes, dtypes and devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core_helpers import VOCAB, batch_of, here_of, random_groups, tiny_model, tiny_run

from launcher.plan.parameters import vocabulary
from launcher.recipe.load import load_recipe
from megatron_rl.algorithms.logprobs import predicted_logprobs
from megatron_rl.algorithms.packing import MicroBatch, pack
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


def test_training_works_at_the_shapes_of_the_largest_recipe(platform: Any, groups: Any) -> None:
    """Runs one of its identical layers on one rank, with a sequence of full length and eight answers to one prompt.
    tests/runs/test_shipped_recipes_rehearsed.py covers other kinds of recomputation."""
    config = load_recipe("qwen2.5-32b-dapo").config
    rows = vocabulary(config)
    assert rows is not None
    model = config.model.model_copy(update={"num_layers": 1})
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

    def loss(hidden: torch.Tensor, read: ModelInput) -> torch.Tensor:
        logprobs, entropy = predicted_logprobs(hidden, policy.output(), read.targets, temperature=1.0)
        assert entropy is not None
        seen.append((tuple(hidden.shape), hidden.dtype, tuple(logprobs.shape), logprobs.dtype, tuple(entropy.shape)))
        return -logprobs.sum()

    with PhantomDevice() as device:
        policy = build_policy(model, rows, PhantomCuda(device), config.training.recompute)
        inputs = [ModelInput.of(policy, micro) for micro in microbatches]
        forward_backward(policy, inputs, loss, Pipeline(), stop=lambda: False)
    assert seen == [
        ((tokens, model.hidden_size), torch.bfloat16, (tokens,), torch.float32, (tokens,))
        for tokens in (length - prompt, 4000, 0)
    ]
    for name, weight in policy.named_parameters():
        assert weight.grad is not None, name
        assert (weight.grad.shape, weight.grad.dtype) == (weight.shape, torch.bfloat16), name


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
