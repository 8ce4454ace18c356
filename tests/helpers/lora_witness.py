"""Adapters of a policy in `transformers` and PEFT, as independent references in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from published_twin import published_twin
from torch import Tensor
from torch.func import functional_call

from megatron_rl.model.hf_parts import held_adapters
from megatron_rl.model.lora_mapping import matrices, module_of
from megatron_rl.model.policy import Policy
from megatron_rl.recipe.model import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def adapters_of(policy: Policy, model: ModelConfig, *, gradients: bool = False) -> dict[str, Tensor]:
    """Whole matrices of all adapters, or their gradients, by PEFT's names, of a policy on one rank."""
    assert model.lora is not None
    parameters = dict(policy.named_parameters())
    found = {}
    for held in held_adapters(policy, model):
        tensor = parameters[held.name].grad if gradients else held.tensor
        assert tensor is not None, held.name
        for name, matrix in matrices(held.weight, tensor).items():
            if module_of(name).rpartition(".")[2] in model.lora.targets:
                found[name] = matrix.detach().clone()
    return found


class MergedWitness:
    """The model of `transformers` in float64, whose weights are W + scale B A with A and B as leaves of autograd."""

    def __init__(self, policy: Policy, model: ModelConfig) -> None:
        assert model.lora is not None
        self.model: PreTrainedModel = published_twin(policy, model).double()
        self.model.config._experts_implementation = "eager"  # torch's grouped product has no float64
        self.leaves = {name: each.double().requires_grad_() for name, each in adapters_of(policy, model).items()}
        self._scale = model.lora.scale

    def logits(self, tokens: list[int]) -> Tensor:
        """[tokens, vocabulary] in float64."""
        result = functional_call(self.model, self._weights(), (torch.tensor([tokens]),))
        logits: Tensor = result.logits[0]
        return logits

    def gradients(self) -> dict[str, Tensor]:
        return {name: leaf.grad for name, leaf in self.leaves.items() if leaf.grad is not None}

    def _weights(self) -> Mapping[str, Tensor]:
        deltas = {
            module_of(name): self._scale * self.leaves[name.replace("lora_A", "lora_B")] @ leaf
            for name, leaf in self.leaves.items()
            if "lora_A" in name
        }
        base = {name: weight.detach() for name, weight in self.model.named_parameters()}
        for module, delta in deltas.items():
            if f"{module}.weight" in base:
                base[f"{module}.weight"] = base[f"{module}.weight"] + delta
        for name in [name for name in base if ".mlp.experts." in name]:  # all experts of a layer in one tensor
            prefix, _, kind = name.rpartition(".")
            parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            added = []
            for expert, whole in enumerate(base[name]):
                rows = whole.chunk(len(parts))
                each = [
                    deltas.get(f"{prefix}.{expert}.{part}", torch.zeros_like(own))
                    for part, own in zip(parts, rows, strict=True)
                ]
                added.append(torch.cat(each))
            base[name] = base[name] + torch.stack(added)
        return base
