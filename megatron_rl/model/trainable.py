"""The part of a policy that training changes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from megatron_rl.model.hf_mapping import HfTensor
from megatron_rl.model.hf_parts import global_names, held_adapters
from megatron_rl.model.lora import Adapter
from megatron_rl.model.lora_mapping import LORA_A, is_adapter
from megatron_rl.model.policy import Policy
from megatron_rl.model.router import is_correction
from megatron_rl.model.sharded_names import PREDICTION
from megatron_rl.recipe.lora_section import LoraConfig
from megatron_rl.recipe.model import ModelConfig

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Trainable:
    """The weights that training changes: all, or with `model.lora` the adapters alone. They are optimised, so that
    gradients and the optimizer's state, on the device or off-loaded, are theirs; checkpoints hold them; and engines get
    them with every version. The other weights stay as they were loaded, and engines get them once."""

    lora: LoraConfig | None

    @classmethod
    def of(cls, model: ModelConfig) -> Trainable:
        return cls(model.lora)

    @property
    def everything(self) -> bool:
        return self.lora is None

    def includes(self, name: str) -> bool:
        """Whether training changes a weight, by the name of its parameter or of its tensor in the sharded state."""
        return self.lora is None or is_adapter(name)

    def mark(self, policy: Policy) -> None:
        """Make gradients those of the trained weights only, and name the adapters."""
        for name, weight in policy.named_parameters():
            weight.requires_grad_(self.includes(name) and not is_correction(name))
            if name.startswith(PREDICTION):
                weight.shared = True  # megatron-core then leaves it out of the gradient's norm: it has another one
        for name, global_name in global_names(policy).items():
            linear, _, kind = name.rpartition(".")
            if kind == LORA_A:
                policy.get_submodule(linear).full_name = global_name

    def trained(self, sharded_state: Mapping[str, Item]) -> dict[str, Item]:
        return {name: item for name, item in sharded_state.items() if self.includes(name)}

    def initial(self, sharded_state: Mapping[str, Item]) -> dict[str, Item]:
        """Part of a model's sharded state that initial weights set: all except the adapters."""
        return {name: item for name, item in sharded_state.items() if self.lora is None or not is_adapter(name)}


def load_part(policy: Policy, state: Mapping[str, Any]) -> None:
    unknown = policy.load_state_dict(state, strict=False).unexpected_keys
    assert not unknown, f"the policy has no {unknown[0]}"


@torch.no_grad()
def merge_adapters(policy: Policy) -> None:
    """Add all adapters to the weights, for a policy that is not trained further, and leave them out of products. No-op
    for a policy without adapters."""
    for module in policy.modules():
        if isinstance(module, Adapter):
            module.weight.copy_(module.merged())
            module.lora_B.zero_()
    if policy.adapters:
        policy.adapters.on = False


@torch.no_grad()
def fill_adapters(policy: Policy, model: ModelConfig, seed: int) -> None:
    """Set this rank's part of all adapters to the start of training, the same in every layout: B to 0, so that the
    policy is its base, and A as PEFT does."""
    for held in held_adapters(policy, model) if model.lora else ():
        for piece in held.pieces():
            if held.name.endswith(LORA_A):
                start = piece.within(initial_matrix(piece.source, seed))
                piece.view.copy_(start.reshape(piece.view.shape))
            else:
                piece.view.zero_()


def initial_matrix(source: HfTensor, seed: int) -> torch.Tensor:
    """[rank, inputs] A of a module at the start of training, in fp32: uniform between -1 / sqrt(inputs) and its
    negative (Kaiming's with a = sqrt(5)), drawn from a separate generator."""
    digest = hashlib.sha256(f"{seed} {source.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    bound = source.shape[1] ** -0.5
    return torch.empty(source.shape).uniform_(-bound, bound, generator=generator)
