"""The formula of the model's arithmetic is what torch counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core_helpers import tiny_model, tiny_policy
from torch.utils.flop_counter import FlopCounterMode

from megatron_rl.model.flops import training_flops
from megatron_rl.platform.attention import whole_sequences


@pytest.mark.parametrize("head_dim", [None, 6])
def test_the_products_with_weights_are_those_that_torch_counts(platform: Any, head_dim: int | None) -> None:
    model = tiny_model(head_dim=head_dim)
    policy = tiny_policy(platform, model)
    tokens, select = torch.arange(11), torch.tensor([4, 7, 10])
    with FlopCounterMode(display=False) as counter:
        policy(tokens, torch.arange(11), policy.layout(whole_sequences([11])), select).sum().backward()
    by_kind = counter.get_flop_counts()["Global"]
    counted = sum(by_kind[kind] for kind in (torch.ops.aten.mm, torch.ops.aten.addmm) if kind in by_kind)
    assert training_flops(model, policy.vocab_size, tokens=11, pairs=0, predictions=3) == counted


def test_each_pair_costs_two_products_of_a_head_in_every_layer_three_times_over() -> None:
    model = tiny_model(num_layers=5, num_attention_heads=4, num_query_groups=2, head_dim=6)
    pairs = training_flops(model, 16, tokens=0, pairs=7, predictions=0)
    assert pairs == 3 * 5 * 7 * 4 * (2 * 6 + 2 * 6)
