"""megatron-core's engine with flash-attn's kernels gives the native engine's greedy tokens on a GPU."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from core_helpers import END, tiny_model, tiny_policy
from gpu_helpers import NEEDS_CUDA

from megatron_rl.generate.engine.engine import Engine
from megatron_rl.generate.engine.interface import Completion, GenerationRequest, RankEngine
from megatron_rl.generate.engine.megatron_engine import MegatronEngine
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.inference import InferenceConfig, Sampling

pytestmark = NEEDS_CUDA

GREEDY = Sampling(temperature=0.0, max_new_tokens=24)
PROMPTS = [[1, 10, 2, 12], [7], [*range(13)] * 30, [9, 9]]


def answers(engine: RankEngine) -> list[Completion]:
    async def together() -> list[list[Completion]]:
        requests = [GenerationRequest(prompt, 1, GREEDY, key=0) for prompt in PROMPTS]
        return await asyncio.wait_for(asyncio.gather(*map(engine.generate, requests)), timeout=120)

    found = [one for (one,) in asyncio.run(together())]
    engine.end_phase()
    return found


def test_greedy_tokens_and_their_logprobs_are_those_of_the_native_engine(platform: Any, groups: Any) -> None:
    # Heads of 64, which flash-attn supports, and weights that leave no near ties between tokens in bf16.
    model = tiny_model(dtype="bf16", head_dim=64, max_position_embeddings=1024)
    policy = tiny_policy(platform, model, scale=0.3).requires_grad_(False).eval()
    config = InferenceConfig(max_batch=8)
    try:
        megatron = MegatronEngine(policy, model, config, {END})
    except ConfigurationError as missing:
        pytest.skip(str(missing))
    native = answers(Engine(policy, model, config, {END}))
    for _ in range(2):  # a second phase has a new cache
        for theirs, ours in zip(answers(megatron), native, strict=True):
            assert theirs.tokens == ours.tokens
            torch.testing.assert_close(torch.tensor(theirs.logprobs), torch.tensor(ours.logprobs), rtol=0, atol=5e-2)
