"""Experts in grouped products compute what experts one by one compute, and never make the host wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from core_helpers import VOCAB, grouped_products, stir, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from launcher.recipe.load import load_recipe
from megatron_rl.learn.training.optimizer import PolicyOptimizer
from megatron_rl.model.experts import GroupedDispatcher, GroupedExperts, Order
from megatron_rl.model.platform.attention import whole_sequences
from megatron_rl.model.platform.grouped_product import as_one, grouped_linear, put_in_one_storage
from megatron_rl.model.platform.phantom import PhantomCuda, PhantomDevice
from megatron_rl.model.policy import Policy, build_policy
from megatron_rl.model.trainable import Trainable
from megatron_rl.recipe.model import ModelConfig
from megatron_rl.recipe.training import OptimizerConfig

MODEL = tiny_model(tied_embeddings=False, num_experts=6, experts_per_token=2, expert_ffn_hidden_size=24)
LORA = {"rank": 3, "targets": ["q_proj", "up_proj", "down_proj"], "dropout": 0.3}
TOKENS = 37

Sizes = st.lists(st.integers(0, 5), min_size=1, max_size=6)


def groups_of(sizes: list[int], inputs: int, outputs: int) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    """Rows, ends and weights of groups, and a gradient of the product."""
    generator = torch.Generator().manual_seed(7)
    rows, gradient = (torch.randn(sum(sizes), width, generator=generator) for width in (inputs, outputs))
    weights = [torch.randn(outputs, inputs, generator=generator).requires_grad_() for _ in sizes]
    return rows.requires_grad_(), torch.tensor(sizes).cumsum(0).int(), weights, gradient


@given(Sizes)
def test_product_and_gradients_are_those_of_each_group(sizes: list[int]) -> None:
    rows, ends, weights, gradient = groups_of(sizes, inputs=8, outputs=16)
    product = grouped_linear(rows, ends, weights)
    product.backward(gradient)
    first = 0
    for size, weight in zip(sizes, weights, strict=True):
        mine = slice(first, first := first + size)
        exact, of_rows = weight.detach().double(), rows.detach()[mine].double()
        assert rows.grad is not None
        assert weight.grad is not None
        torch.testing.assert_close(product[mine], (of_rows @ exact.T).float())
        torch.testing.assert_close(rows.grad[mine], (gradient[mine].double() @ exact).float())
        torch.testing.assert_close(weight.grad, (gradient[mine].double().T @ of_rows).float())


def test_a_frozen_weight_gets_no_gradient() -> None:
    rows, ends, weights, gradient = groups_of([2, 3], inputs=8, outputs=8)
    for weight in weights:
        weight.requires_grad_(False)
    grouped_linear(rows, ends, weights).backward(gradient)
    assert rows.grad is not None
    assert weights[0].grad is None


@given(st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=8))
def test_sorted_rows_are_restored_as_the_sum_of_the_copies(keys: list[list[int]]) -> None:
    order = Order(torch.tensor(keys).flatten(), copies=3)
    tokens = torch.arange(4.0 * len(keys)).view(-1, 4).requires_grad_()
    rows = order.sort(tokens)
    assert (order.pick(torch.tensor(keys)).diff() >= 0).all()
    numbers = torch.arange(3 * len(keys)).view(-1, 3)
    assert order.pick(numbers).tolist() == sorted(range(3 * len(keys)), key=lambda row: keys[row // 3][row % 3])
    assert torch.equal(rows, tokens[order.pick(numbers) // 3])
    restored = order.restore(rows)
    torch.testing.assert_close(restored, 3 * tokens)
    restored.sum().backward()
    assert tokens.grad is not None
    assert (tokens.grad == 3).all()


def test_equal_tensors_at_equal_distances_are_not_copied() -> None:
    buffer = torch.arange(40.0)
    apart = [buffer[start : start + 6].view(2, 3) for start in (0, 10, 20)]
    assert as_one(apart).data_ptr() == buffer.data_ptr()
    assert torch.equal(as_one(apart), torch.stack(apart))
    uneven = [apart[0], apart[2], apart[1]]
    assert torch.equal(as_one(uneven), torch.stack(uneven))
    alone = [torch.full((2, 3), float(number)) for number in range(3)]
    put_in_one_storage(alone)
    assert as_one(alone).data_ptr() == alone[0].data_ptr()
    assert [each[0, 0].item() for each in alone] == [0, 1, 2]


def pair(platform: Any, model: ModelConfig) -> tuple[Policy, Policy]:
    """A policy with its experts one by one, and one with the same weights and grouped experts."""
    policies = []
    for grouped in (False, True):
        platform.seed(5)
        if grouped:
            with grouped_products():
                policy = build_policy(model, VOCAB, platform)
        else:
            policy = build_policy(model, VOCAB, platform)
        stir(policy, 0.3)
        Trainable.of(model).mark(policy)
        assert isinstance(policy.decoder.layers[0].mlp.experts, GroupedExperts) == grouped
        policies.append(policy)
    return policies[0], policies[1]


@pytest.mark.parametrize("lora", [None, LORA], ids=["weights", "adapters"])
def test_logits_and_gradients_are_those_of_experts_one_by_one(platform: Any, groups: Any, lora: Any) -> None:
    model = MODEL if lora is None else ModelConfig.model_validate(MODEL.model_dump() | {"lora": lora})
    policies = pair(platform, model)
    tokens = torch.randint(VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(3))
    logits = []
    for policy in policies:
        with policy.dropout(1, 2):
            logits.append(policy(tokens, torch.arange(TOKENS), policy.layout(whole_sequences([TOKENS]))))
        logits[-1].logsumexp(-1).sum().backward()
    torch.testing.assert_close(logits[1], logits[0])
    for (name, one), (other_name, other) in zip(*(each.named_parameters() for each in policies), strict=True):
        assert name == other_name
        if one.requires_grad:
            assert one.grad.norm() > 0, name
            assert (other.grad - one.grad).norm() < 1e-5 * one.grad.norm(), name
    assert {*policies[0].sharded_state_dict()} == {*policies[1].sharded_state_dict()}


@pytest.mark.parametrize("distributed", [False, True])
def test_weights_are_read_in_place_also_where_an_optimizer_lays_them_out(
    platform: Any, groups: Any, distributed: bool
) -> None:
    _, policy = pair(platform, MODEL)
    PolicyOptimizer(policy, MODEL, OptimizerConfig(learning_rate=1e-3, distributed=distributed), 10)
    for layer in policy.decoder.layers:
        for name in ("linear_fc1", "linear_fc2"):
            weights = [each.weight for each in layer.mlp.experts._linears(name)]
            assert as_one(weights).data_ptr() == weights[0].data_ptr()
            assert torch.equal(as_one(weights), torch.stack(weights))


@pytest.mark.parametrize("recipe", ["qwen3-30b-a3b-dapo", "gpt-oss-20b-dapo", "glm-4.5-air-dapo"])
def test_host_reads_no_value_at_the_shapes_of_the_shipped_recipe(platform: Any, groups: Any, recipe: str) -> None:
    """So a decode step can be recorded: its 64 rows are 512 rows of experts, whatever the router chooses."""
    without_windows = {"num_layers": 2, "layer_types": None}  # whose masks the layout makes at their first use
    model = load_recipe(recipe).config.model.model_copy(update=without_windows)
    with PhantomDevice(torch.device("cuda", 0)) as gpu, torch.no_grad():
        policy = build_policy(model, 1000, PhantomCuda(gpu))
        dispatcher = policy.decoder.layers[1].mlp.token_dispatcher
        assert isinstance(dispatcher, GroupedDispatcher)
        tokens = torch.zeros(64, dtype=torch.long, device=gpu.device)
        layout = policy.layout(whole_sequences([64]))
        waits = gpu.waits
        logits = policy(tokens, tokens, layout)
    assert logits.shape == (64, 1000)
    assert gpu.waits == waits


def test_tokens_and_probabilities_reach_the_right_expert(platform: Any, groups: Any) -> None:
    """Against a float64 computation of the layer's formula, from the weights by their names."""
    _, policy = pair(platform, MODEL)
    mlp = policy.decoder.layers[1].mlp
    hidden = torch.randn(TOKENS, 1, MODEL.hidden_size, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        found = mlp(hidden)[0][:, 0]
    exact = np.zeros((TOKENS, MODEL.hidden_size))
    weights = {name: weight.detach().double().numpy() for name, weight in mlp.named_parameters()}
    for token, row in enumerate(hidden[:, 0].double().numpy()):
        logits = weights["router.weight"] @ row
        chosen = np.argsort(-logits)[: MODEL.experts_per_token]
        shares = np.exp(logits[chosen]) / np.exp(logits[chosen]).sum()
        for expert, share in zip(chosen, shares, strict=True):
            fc1, fc2 = (weights[f"experts.local_experts.{expert}.linear_fc{one}.weight"] for one in (1, 2))
            gate, up = np.split(fc1 @ row, 2)
            exact[token] += share * fc2 @ (gate / (1 + np.exp(-gate)) * up)
    np.testing.assert_allclose(found.numpy(), exact, rtol=1e-4, atol=1e-4)
