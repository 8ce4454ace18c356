"""The policy computes what `transformers` computes from the exported weights, for each published family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core_helpers import GPT_OSS, VOCAB, answer_of, packed, prompt_of, random_groups, tiny_model, tiny_policy
from family_shapes import GLM, LARGER_GLM
from published_twin import published, published_gradients, published_twin

from megatron_rl.algorithms.logprobs import token_logprobs
from megatron_rl.recipe.model import Recompute

LATENT = {
    "latent_attention": {
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 5,
    },
    "num_query_groups": 4,
    "qkv_bias": False,
    "tied_embeddings": False,
    "architecture": "deepseek_v3",
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 12,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    },
    "num_experts": 8,
    "experts_per_token": 2,
    "expert_ffn_hidden_size": 20,
    "dense_layers": 1,
    "shared_expert_ffn_hidden_size": 20,
    "router": {"score": "sigmoid", "scale": 2.5, "groups": 4, "groups_per_token": 2, "correction_bias": True},
}
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
    "DeepSeek-V3": LATENT,
    "gpt-oss": GPT_OSS,
    "GLM-4.5-Air": GLM,
    "GLM-4.5": LARGER_GLM,
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
    torch.testing.assert_close(gradients, published_gradients(twin), rtol=1e-4, atol=1e-4)
