"""The formulas for a model's arithmetic agree with what torch counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core_helpers import VOCAB, tiny_model, tiny_policy
from family_shapes import DEEPSEEK, GEMMA, OLMO, QWEN3_NEXT
from torch.utils.flop_counter import FlopCounterMode

from launcher.plan.memory_terms import WEIGHT_BYTES, kept_bytes
from launcher.plan.sizes import Sizes
from launcher.recipe.load import load_recipe
from launcher.recipe.shipped import shipped_recipes
from megatron_rl.algorithms.packing import pack
from megatron_rl.learn.training.schedule import ModelInput, Pipeline, forward_backward
from megatron_rl.model.platform.attention import whole_sequences
from megatron_rl.model.trainable import Trainable
from megatron_rl.recipe.flops import rows_per_token, training_flops
from megatron_rl.recipe.layer_sizes import head_widths, layer_kinds

EXPERTS: dict[str, Any] = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 20}
COUNTED: dict[str, dict[str, Any]] = {
    "dense": {},
    "heads of another size": {"head_dim": 6},
    "experts": EXPERTS,
    "DeepSeek-V3": DEEPSEEK,
    "Qwen3-Next": QWEN3_NEXT,
    "Gemma 3": GEMMA,
    "OLMo 3": OLMO,
}


@pytest.mark.parametrize("shape", COUNTED.values(), ids=COUNTED)
def test_products_with_weights_are_those_that_torch_counts(platform: Any, groups: Any, shape: dict[str, Any]) -> None:
    model = tiny_model(**shape)
    policy = tiny_policy(platform, model)
    tokens = select = torch.arange(16)  # a number that needs no padding of products
    with FlopCounterMode(display=False) as counter:
        policy(tokens, torch.arange(16), policy.layout(whole_sequences([16])), select).sum().backward()
    by_kind = counter.get_flop_counts()["Global"]
    counted = sum(by_kind[kind] for kind in (torch.ops.aten.mm, torch.ops.aten.addmm) if kind in by_kind)
    of_memories = 0
    if net := model.delta_net:  # each token decays and reads, corrects, writes: no product with a weight
        layers = (model.layer_types or []).count("linear_attention")
        of_memories = 3 * 6 * layers * net.value_heads * net.key_head_dim * net.value_head_dim * 16
    assert training_flops(model, policy.vocab_size, tokens=16, pairs=0, predictions=16) == counted + of_memories


@pytest.mark.parametrize("shape", [{}, DEEPSEEK], ids=["dense", "DeepSeek-V3"])
def test_products_of_a_trained_prediction_layer_are_those_that_torch_counts(
    platform: Any, groups: Any, shape: dict[str, Any]
) -> None:
    model = tiny_model(**shape, prediction_layers=1, prediction_loss_coefficient=0.1)
    policy = tiny_policy(platform, model)
    ahead, found = 16, []  # tokens that the layer reads, and predicts
    (row,) = pack([[number % VOCAB for number in range(18)]], [[False] + [True] * 17], [0], 18)
    for loss in (None, lambda hidden, read: (hidden @ policy.output().weight.detach().T).sum()):
        with FlopCounterMode(display=False) as counter:
            read = [ModelInput.of(policy, row)]
            forward_backward(policy, read, lambda h, _: h.sum(), Pipeline(), stop=lambda: False, loss_ahead=loss)
        by_kind = counter.get_flop_counts()["Global"]
        found.append(sum(by_kind.get(kind, 0) for kind in (torch.ops.aten.mm, torch.ops.aten.addmm)))
    sizes = {"tokens": ahead, "pairs": 0, "predictions": ahead}
    formula = training_flops(model, policy.vocab_size, **sizes) - training_flops(
        model.trunk, policy.vocab_size, **sizes
    )
    assert formula == found[1] - found[0]


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["gate_proj", "down_proj", "o_proj"]])
@pytest.mark.parametrize("shape", [{}, EXPERTS], ids=["dense", "experts"])
def test_weights_that_are_not_trained_have_no_gradient(
    platform: Any, groups: Any, shape: dict[str, Any], targets: list[str]
) -> None:
    """The formula leaves out products with zeros in fused linears, and counts gradients below the first adapter."""
    shape = shape | {"num_layers": 8}
    model = tiny_model(lora={"rank": 1, "targets": targets}, **shape)
    policy = tiny_policy(platform, model)
    Trainable.of(model).mark(policy)
    tokens = select = torch.arange(16)
    with FlopCounterMode(display=False) as counter:
        policy(tokens, torch.arange(16), policy.layout(whole_sequences([16])), select).sum().backward()
    by_kind = counter.get_flop_counts()["Global"]
    counted = sum(by_kind[kind] for kind in (torch.ops.aten.mm, torch.ops.aten.addmm) if kind in by_kind)
    formula = training_flops(model, policy.vocab_size, tokens=16, pairs=0, predictions=16)
    assert formula == pytest.approx(counted, rel=0.04)
    assert formula < training_flops(tiny_model(**shape), policy.vocab_size, tokens=16, pairs=0, predictions=16)


def test_each_pair_costs_three_times_two_products_of_a_head_in_every_layer() -> None:
    model = tiny_model(num_layers=5, num_attention_heads=4, num_query_groups=2, head_dim=6)
    pairs = training_flops(model, 16, tokens=0, pairs=7, predictions=0)
    assert pairs == 3 * 5 * 7 * 4 * (2 * 6 + 2 * 6)


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("name", [name for name in shipped_recipes() if not name.startswith("demo")])
def test_a_gathered_row_keeps_no_more_than_it_counts_for(name: str, recompute: str) -> None:
    """A bin of any GPU recipe then keeps no more than the plan allows for its packed tokens."""
    config = load_recipe(name, ["training.transformer_impl=local"]).config  # keeps the least
    model = config.model
    sizes = Sizes(**dict.fromkeys(Sizes.__dataclass_fields__, 1) | {"sequence_parallel": False})
    row = WEIGHT_BYTES[model.dtype] * sum(head_widths(model)) + 4 * model.num_attention_heads
    rows = row * sum(count for kind, count in layer_kinds(model).items() if kind.attention != "linear_attention")
    kept = sum(count * kept_bytes(config, sizes, recompute, kind) for kind, count in layer_kinds(model).items())
    assert rows * rows_per_token(model) <= kept
    assert 2 <= rows_per_token(model) <= 8
