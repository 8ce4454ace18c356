"""The policy computes what `transformers` computes from the exported weights, for each published family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core_helpers import tiny_model, tiny_policy
from family_shapes import DEEPSEEK, DENSE_QUERIES, GEMMA, GLM, GPT_OSS, LARGER_GLM, OLMO, QWEN3_NEXT, QWEN35, QWEN35_MOE
from published_twin import packed_beside_twin

from megatron_rl.recipe.model import Recompute

FAMILIES: dict[str, dict[str, Any]] = {
    "DeepSeek-V3": DEEPSEEK,
    "DeepSeek-V3, one projection of queries": DENSE_QUERIES,
    "gpt-oss": GPT_OSS,
    "GLM-4.5-Air": GLM,
    "GLM-4.5": LARGER_GLM,
    "Qwen3-Next": QWEN3_NEXT,
    "Qwen3.5": QWEN35,
    "Qwen3.5 with experts": QWEN35_MOE,
    "Gemma 3": GEMMA,
    "OLMo 3": OLMO,
}


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("shape", FAMILIES.values(), ids=FAMILIES)
def test_packed_answers_have_the_logprobs_and_gradients_of_the_published_model(
    platform: Any, groups: Any, shape: dict[str, Any], recompute: Recompute
) -> None:
    """Compares answers of mixed lengths that share prompts in one packed forward with one sequence at a time."""
    model = tiny_model(**shape)
    compared = packed_beside_twin(tiny_policy(platform, model, recompute=recompute), model)
    torch.testing.assert_close(compared.logprobs, compared.their_logprobs, rtol=1e-5, atol=1e-5)
    gradients, theirs = compared.gradients, compared.their_gradients
    assert gradients.keys() == theirs.keys()
    for name, gradient in theirs.items():  # sums of large terms may be near 0
        atol = 1e-4 * max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=atol, msg=f"{name}: {{}}".format)
