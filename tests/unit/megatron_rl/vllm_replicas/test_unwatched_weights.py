"""Weights that vLLM's loader of gpt-oss copies past its reload arrive all the same."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import Module, ModuleList, Parameter

from megatron_rl.generate.vllm.unwatched_weights import UnwatchedWeights


class Attention(Module):
    """vLLM's attention of a layer, on a rank with two heads, whose kernel keeps its sinks in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = Parameter(torch.zeros(2, dtype=torch.bfloat16))
        self.attn = Module()
        self.attn.impl = SimpleNamespace(sinks=torch.zeros(2))


def layers() -> Module:
    model = Module()
    model.layers = ModuleList()
    for _ in range(2):
        layer = Module()
        layer.attn = Attention()
        model.layers.append(layer)
    return model


def test_experts_of_a_layer_come_one_by_one_to_the_loader() -> None:
    prefix = "model.layers.1.mlp.experts"
    tensors = {
        f"{prefix}.gate_up_proj": torch.arange(12.0).view(2, 3, 2),
        f"{prefix}.down_proj_bias": torch.arange(6.0).view(2, 3),
        "model.layers.1.mlp.router.weight": torch.ones(2, 3),
    }
    found = dict(UnwatchedWeights(stacked_experts=True).watched(tensors.items()))
    assert [*found] == [
        *(f"{prefix}.{number}.gate_up_proj" for number in range(2)),
        *(f"{prefix}.{number}.down_proj_bias" for number in range(2)),
        "model.layers.1.mlp.router.weight",
    ]
    assert torch.equal(found[f"{prefix}.1.gate_up_proj"], tensors[f"{prefix}.gate_up_proj"][1])
    assert [*UnwatchedWeights(stacked_experts=False).watched(tensors.items())] == [*tensors.items()]


def test_sinks_are_set_where_parameters_and_kernels_have_them() -> None:
    """A rank has its part of the heads; nothing moves in memory, because recordings keep addresses."""
    weights, model = UnwatchedWeights(stacked_experts=True), layers()
    sinks = {layer: torch.arange(4.0) + 10 * layer for layer in range(2)}
    named = [(f"model.layers.{layer}.self_attn.sinks", each) for layer, each in sinks.items()]
    before = [holders(model, layer) for layer in range(2)]
    assert [*weights.watched(named)] == []
    weights.put(model, 1)
    for layer, each in sinks.items():
        for own, former in zip(holders(model, layer), before[layer], strict=True):
            assert own is former
            assert own.tolist() == each[2:].tolist()


def holders(model: Module, layer: int) -> tuple[Tensor, Tensor]:
    attention = model.layers[layer].attn
    return attention.sinks, attention.attn.impl.sinks
