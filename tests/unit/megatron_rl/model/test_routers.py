"""Choices of experts: replayed ones, and the correction bias. Routers of transformers are in test_expert_layers.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core_helpers import full_forward, tiny_model, tiny_policy
from torch import Tensor

from megatron_rl.generate.refit.model_tensors import weights_by_box
from megatron_rl.learn.training.optimizer import PolicyOptimizer
from megatron_rl.model.platform.attention import whole_sequences
from megatron_rl.model.policy import Policy
from megatron_rl.model.router import ExpertRouter, forget_tokens
from megatron_rl.model.routing import choice_scores, moved_correction, weights_of
from megatron_rl.model.sharded_names import weight_name
from megatron_rl.model.trainable import Trainable
from megatron_rl.recipe.model_parts import RouterConfig
from megatron_rl.recipe.training import OptimizerConfig

EXPERTS = {
    "tied_embeddings": False,
    "num_experts": 6,
    "experts_per_token": 2,
    "expert_ffn_hidden_size": 20,
    "dense_layers": 1,
    "shared_expert_ffn_hidden_size": 16,
    "expert_bias": True,
    "router": {"score": "sigmoid", "groups": 3, "groups_per_token": 2, "correction_bias": True},
}
SENTENCE = [3, 10, 4, 12, 7, 13, 0, 14, 1]


def router_of(policy: Policy) -> ExpertRouter:
    router: ExpertRouter = policy.decoder.layers[-1].mlp.router
    return router


class Fixed:
    """Replays the same choices for every token."""

    def __init__(self, choices: list[int]) -> None:
        self.choices = choices
        self.scores: dict[int, Tensor] = {}

    def choose(self, layer_number: int, scores: Tensor) -> Tensor:
        self.scores[layer_number] = scores
        return torch.tensor(self.choices).expand(len(scores), -1)


def test_replayed_choices_have_the_weights_and_gradients_of_the_present_scores(platform: Any, groups: Any) -> None:
    policy = tiny_policy(platform, tiny_model(**EXPERTS))
    router, fixed = router_of(policy), Fixed([5, 0])
    router.replay = fixed
    hidden = torch.randn(7, 1, 32, generator=torch.Generator().manual_seed(1))
    weights, marks = router(hidden)
    assert marks.nonzero()[:, 1].tolist() == [0, 5] * 7
    scores = (hidden[:, 0] @ router.weight.T).sigmoid()[:, [0, 5]]
    torch.testing.assert_close(weights[:, [0, 5]], scores / scores.sum(dim=1, keepdim=True))
    weights[:, 0].sum().backward()
    assert router.weight.grad is not None
    assert router.weight.grad[[0, 5]].norm() > 0 and not router.weight.grad[[1, 2, 3, 4]].any()
    assert list(fixed.scores) == [2]  # the only layer with experts, counted from 1
    assert (fixed.scores[2].isinf().sum(dim=1) == 2).all()  # one group of two is left out


def test_scores_of_the_choice_do_not_weigh() -> None:
    rule = RouterConfig(score="softmax", correction_bias=True, normalised=False, scale=2.0)
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    scores = choice_scores(logits, rule, torch.tensor([0.0, 0.0, 0.0, 1.0]))
    choices = scores.topk(2, dim=1).indices
    assert choices.tolist() == [[3, 0]]
    torch.testing.assert_close(weights_of(logits, choices, rule), 2 * logits.softmax(1)[:, [3, 0]])


def test_correction_rises_for_experts_with_fewer_tokens_than_the_mean() -> None:
    moved = moved_correction(torch.tensor([0.5, 0.0, 0.0, 0.0]), torch.tensor([8, 4, 0, 4]), 0.1)
    torch.testing.assert_close(moved, torch.tensor([0.4, 0.0, 0.1, 0.0]))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_an_update_moves_the_correction_by_the_tokens_of_its_passes(platform: Any, groups: Any, recompute: Any) -> None:
    model = tiny_model(**EXPERTS, router_bias_update_rate=0.01)
    policy = tiny_policy(platform, model, recompute=recompute)
    Trainable.of(model).mark(policy)
    router = router_of(policy)
    optimizer = PolicyOptimizer(policy, model, OptimizerConfig(learning_rate=1e-3), 10)
    before, marks = router.expert_bias.clone(), []
    router.register_forward_hook(lambda _module, _given, out: marks.append(out[1]))
    full_forward(policy, SENTENCE[::-1])  # scores: it is not counted
    optimizer.zero_grad()
    layout = policy.layout(whole_sequences([len(SENTENCE)]))
    policy(torch.tensor(SENTENCE), torch.arange(len(SENTENCE)), layout).logsumexp(-1).sum().backward()
    assert optimizer.update(0).applied
    assert len(marks[-1]) > len(SENTENCE)  # rows of padding, which are not counted
    tokens = marks[-1][: len(SENTENCE)].sum(dim=0)
    torch.testing.assert_close(router.expert_bias.detach(), moved_correction(before, tokens, 0.01))
    forget_tokens(policy)
    assert not router.tokens.any()


def test_a_correction_is_a_weight_in_fp32_that_no_gradient_trains(platform: Any, groups: Any) -> None:
    model = tiny_model(**EXPERTS, dtype="bf16")
    policy = tiny_policy(platform, model)
    Trainable.of(model).mark(policy)
    assert [name for name, weight in policy.named_parameters() if not weight.requires_grad] == [
        "decoder.layers.1.mlp.router.expert_bias"
    ]
    assert router_of(policy).expert_bias.dtype == torch.float32
    kept = router_of(policy).expert_bias.clone()
    policy.to(torch.bfloat16)
    assert torch.equal(router_of(policy).expert_bias, kept)


@pytest.mark.parametrize("fields", [EXPERTS, {"qk_norm": True}], ids=["layers that differ", "equal layers"])
def test_tensors_of_checkpoints_have_the_names_of_their_weights(
    platform: Any, groups: Any, fields: dict[str, Any]
) -> None:
    policy = tiny_policy(platform, tiny_model(**fields))
    boxes = weights_by_box(policy)
    assert {weight_name(box.key, box.offset) for box in boxes} == {name for name, _ in policy.named_parameters()}
    assert any(box.key.startswith("decoder.layers.1.") for box in boxes) == ("dense_layers" in fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"experts_per_token": 5}, "experts_per_token 5 exceeds the 4 experts of router.groups_per_token 2"),
        ({"lora": {"rank": 2}, "router_bias_update_rate": 0.1}, "router_bias_update_rate changes the base weights"),
    ],
)
def test_a_contradiction_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_model(**EXPERTS | fields)


def test_the_shared_expert_must_be_divisible() -> None:
    assert any("tp 3 does not divide model.shared_expert_ffn" in each for each in tiny_model(**EXPERTS).undivided(tp=3))
