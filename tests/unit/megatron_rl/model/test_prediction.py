"""The prediction layer computes what its equations say of the published tensors, and leaves the policy alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core_helpers import answer_of, packed, prompt_of, random_groups, tiny_model, tiny_policy
from family_shapes import DEEPSEEK, LARGER_GLM, QWEN3_NEXT, QWEN35, QWEN35_MOE
from prediction_twin import PredictionTwin
from published_twin import published
from torch import Tensor

from megatron_rl.learn.training.ahead import loss_ahead
from megatron_rl.learn.training.schedule import ModelInput, Pipeline, forward_backward
from megatron_rl.model.hf_mapping import sources
from megatron_rl.model.hf_weights import prediction_weights
from megatron_rl.rank.metrics.stats import LossStats, uncounted
from megatron_rl.recipe.hf_config import names_of
from megatron_rl.recipe.model import Recompute

PREDICTS = {"prediction_layers": 1, "prediction_loss_coefficient": 0.3}
FAMILIES = {
    "DeepSeek-V3": DEEPSEEK,
    "GLM-4.5": LARGER_GLM,
    "Qwen3-Next": QWEN3_NEXT,
    "Qwen3.5": QWEN35,
    "Qwen3.5 with experts": QWEN35_MOE,
}


def gradient(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("shape", FAMILIES.values(), ids=FAMILIES)
def test_packed_answers_have_the_loss_and_gradients_of_the_equations(
    platform: Any, groups: Any, shape: dict[str, Any], recompute: Recompute
) -> None:
    """Answers that share prompts, in one packed pass, beside one sequence at a time."""
    model = tiny_model(**shape, **PREDICTS)
    policy = tiny_policy(platform, model, recompute=recompute)
    twin = PredictionTwin(policy, model)
    answers = [one for made in random_groups(4, 4) for one in made.trajectories]
    (micro,) = packed(answers)
    weights = 0.1 + torch.rand(sum(len(answer_of(one)) for one in answers))
    losses = [uncounted(LossStats)]
    forward_backward(
        policy,
        [ModelInput.of(policy, micro)],
        lambda hidden, _: hidden.sum() * 0,
        Pipeline(),
        stop=lambda: False,
        loss_ahead=loss_ahead(policy, lambda of: weights[of], losses),
    )
    known, before = [], 0
    for one in answers:
        length = len(answer_of(one))
        logprobs = twin.logprobs(one.tokens)[max(0, len(prompt_of(one)) - 2) :]
        known.append((weights[before : before + length][-len(logprobs) :] if len(logprobs) else weights[:0], logprobs))
        before += length
    (0.3 * -sum((weight * logprobs).sum() for weight, logprobs in known)).backward()
    assert losses[0].predicted == sum(len(logprobs) for _, logprobs in known)
    expected = -sum(logprobs.sum() for _, logprobs in known)
    torch.testing.assert_close(losses[0].prediction, expected.detach(), rtol=1e-5, atol=1e-5)
    ours = published(policy, model, gradient)
    theirs = twin.gradients()
    assert theirs.keys() == sources(prediction_weights(model, names_of(model))).keys()
    for name, their_gradient in theirs.items():
        atol = 1e-4 * max(1.0, float(their_gradient.abs().max()))
        torch.testing.assert_close(ours[name], their_gradient, rtol=1e-4, atol=atol, msg=f"{name}: {{}}".format)
    assert not any(ours[name].any() for name in ours.keys() - theirs.keys()), "the model has a gradient of this loss"
