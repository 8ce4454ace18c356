"""Greedy answers compared with transformers, which shares no pages and computes no prompt in pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core_helpers import END, tiny_model, tiny_policy
from family_shapes import DEEPSEEK, GEMMA, GPT_OSS, LARGER_GLM, OLMO, QWEN35
from published_twin import published_twin
from streams import answer_all

from megatron_rl.generate.engine.engine import Engine
from megatron_rl.generate.engine.interface import GenerationRequest
from megatron_rl.recipe.inference import InferenceConfig, Sampling

TIE = 1e-4
"""Logits closer than this may swap, since sums in another order round differently."""
NEW_TOKENS = 16
SYSTEM = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]
PROMPTS = [[*SYSTEM, 7], [7], [*SYSTEM, 8, 4], [5, 11, 5], SYSTEM, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [4] * 40]
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen2": {},
    "Llama": {"qkv_bias": False, "tied_embeddings": False},
    "Qwen3": {"qk_norm": True, "qkv_bias": False, "head_dim": 12},
    "gpt-oss": GPT_OSS | {"sliding_window": 6},
    "GLM-4.5": LARGER_GLM,
    "DeepSeek-V3": DEEPSEEK,
    "Qwen3.5": QWEN35,
    "Gemma 3": GEMMA | {"tied_embeddings": False},
    "OLMo 3": OLMO,
}
ENGINES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "pieces and small pages": {"page_tokens": 4, "prefill_tokens": 8, "max_batch": 3},
    "pressure": {"page_tokens": 4, "cache_tokens": 80},
}
ASKED = {"Qwen2": [*ENGINES], "Qwen3.5": [*ENGINES]}
"""Engine configurations to compare where they are not the harder one alone: they depend only on states beside the
the cache."""


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_answers_equal_those_of_transformers_up_to_the_first_tie(platform: Any, groups: Any, shape: str) -> None:
    """After a tie, each token must be the likeliest one given the tokens of transformers before it."""
    model = tiny_model(max_position_embeddings=64, **SHAPES[shape])
    policy = tiny_policy(platform, model, scale=0.2)
    twin = published_twin(policy, model).eval()
    expected = [reference(twin, prompt) for prompt in PROMPTS]
    assert len({token for answer, _ in expected for token in answer}) > 5
    for name in ASKED.get(shape, ["pieces and small pages"]):
        engine = Engine(policy, model, InferenceConfig(**ENGINES[name]), {END})
        greedy = Sampling(temperature=0.0, max_new_tokens=NEW_TOKENS)
        found = answers(engine, [GenerationRequest(prompt, 2, greedy, 0) for prompt in PROMPTS])
        certain = 0
        for (answer, leads), completions in zip(expected, found, strict=True):
            tie = next((place for place, lead in enumerate(leads) if lead < TIE), len(answer))
            certain += tie
            for completion in completions:
                assert completion[:tie] == answer[:tie]
        assert certain > 0.9 * sum(len(answer) for answer, _ in expected)
        forced(engine, expected)


def forced(engine: Engine, expected: list[tuple[list[int], list[float]]]) -> None:
    """Request every token after the previous ones of transformers, all at the same time; most of each prompt is
    shared."""
    one = Sampling(temperature=0.0, max_new_tokens=1)
    asked, likeliest = [], []
    for prompt, (answer, leads) in zip(PROMPTS, expected, strict=True):
        for place, (token, lead) in enumerate(zip(answer, leads, strict=True)):
            asked.append(GenerationRequest([*prompt, *answer[:place]], 1, one, 0))
            likeliest.append((token, lead))
    for (token, lead), ((ours,),) in zip(likeliest, answers(engine, asked), strict=True):
        assert ours == token or lead < TIE


def answers(engine: Engine, requests: list[GenerationRequest]) -> list[list[list[int]]]:
    """Return the tokens of each sample of each request."""
    return [[each.tokens for each in answered] for answered in answer_all(engine, *requests)]


@torch.no_grad()
def reference(twin: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Return the greedy answer of transformers, and the lead of the likeliest token at each position."""
    made = twin.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=END,
        pad_token_id=END,
        return_dict_in_generate=True,
        output_scores=True,
    )
    best = [scores[0].topk(2).values.tolist() for scores in made.scores]
    return made.sequences[0, len(prompt) :].tolist(), [first - second for first, second in best]
