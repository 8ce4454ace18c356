"""The policy computes what `transformers` computes from the exported weights, for each published family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core_helpers import VOCAB, answer_of, packed, prompt_of, random_groups, tiny_model, tiny_policy
from family_shapes import DEEPSEEK, DENSE_QUERIES, GEMMA, GLM, GPT_OSS, LARGER_GLM, QWEN3_NEXT, QWEN35, QWEN35_MOE
from published_twin import published, published_gradients, published_twin

from megatron_rl.algorithms.logprobs import token_logprobs
from megatron_rl.recipe.model import Recompute

QWEN3_MOE = {
    "qk_norm": True,
    "qkv_bias": False,
    "head_dim": 12,
    "tied_embeddings": False,
    "num_experts": 6,
    "experts_per_token": 2,
    "expert_ffn_hidden_size": 20,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3 with experts": QWEN3_MOE,
    "DeepSeek-V3": DEEPSEEK,
    "DeepSeek-V3, one projection of queries": DENSE_QUERIES,
    "gpt-oss": GPT_OSS,
    "GLM-4.5-Air": GLM,
    "GLM-4.5": LARGER_GLM,
    "Qwen3-Next": QWEN3_NEXT,
    "Qwen3.5": QWEN35,
    "Qwen3.5 with experts": QWEN35_MOE,
    "Gemma 3": GEMMA,
}


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("shape", FAMILIES.values(), ids=FAMILIES)
def test_packed_answers_have_the_logprobs_and_gradients_of_the_published_model(
    platform: Any, groups: Any, shape: dict[str, Any], recompute: Recompute
) -> None:
    """Compares answers of mixed lengths that share prompts in one packed forward with one sequence at a time."""
    model = tiny_model(**shape)
    policy = tiny_policy(platform, model, recompute=recompute)
    twin = published_twin(policy, model)
    trajectories = [trajectory for made in random_groups(4, 4) for trajectory in made.trajectories]
    (micro,) = packed(trajectories)
    logits = policy(micro.tokens, micro.positions, policy.layout(micro), micro.select)
    logprobs, _ = token_logprobs(logits, micro.targets, 1.0)
    alone = []
    for trajectory in trajectories:
        start, answer = len(prompt_of(trajectory)) - 1, torch.tensor(answer_of(trajectory))
        tokens = torch.tensor([[*prompt_of(trajectory), *answer_of(trajectory)]])
        their_logits = twin(tokens).logits[0, start:-1, :VOCAB]
        alone.append(torch.log_softmax(their_logits, -1).gather(1, answer[:, None]).squeeze(1))
    expected = torch.cat(alone)[micro.trained]
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)

    spread = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(0))
    (logprobs * spread).sum().backward()
    (expected * spread).sum().backward()
    gradients = published(
        policy, model, lambda weight: torch.zeros_like(weight) if weight.grad is None else weight.grad
    )
    theirs = published_gradients(twin)
    assert gradients.keys() == theirs.keys()
    for name, gradient in theirs.items():  # sums of large terms may be near 0
        atol = 1e-4 * max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=atol, msg=f"{name}: {{}}".format)
