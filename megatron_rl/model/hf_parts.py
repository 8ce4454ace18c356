"""One rank's weights as parts of Hugging Face's tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from megatron_rl.model.hf_mapping import TensorPiece, Weight, pieces
from megatron_rl.model.hf_weights import weights
from megatron_rl.model.lora_mapping import adapters, is_adapter
from megatron_rl.model.policy import Policy
from megatron_rl.recipe.model import ModelConfig


@dataclass(frozen=True, slots=True)
class Held:
    """A weight that this rank has, wholly or in part."""

    name: str  # megatron-core's name, with layers and experts numbered over the whole model
    weight: Weight
    tensor: Tensor  # this rank's part: the memory of its parameter
    ranks: dist.ProcessGroup  # ranks that together have the weight
    copies: dist.ProcessGroup  # ranks with the same part

    def pieces(self, tensor: Tensor | None = None) -> Iterator[TensorPiece]:
        """Locate Hugging Face's tensors in this rank's part, or in a tensor that replaces it. Pieces may be empty if it
        is all padding."""
        return pieces(self.weight, self.tensor if tensor is None else tensor, self.ranks.rank(), self.ranks.size())


def held_weights(policy: Policy, model: ModelConfig) -> list[Held]:
    """Return all weights of this rank's part of a policy except adapters, in the order that its tensor-parallel ranks
    share."""
    whole = model if model.vocab_size is not None else model.model_copy(update={"vocab_size": policy.vocabulary})
    return [*_held(policy, weights(whole), of_adapters=False)]


def held_adapters(policy: Policy, model: ModelConfig) -> list[Held]:
    return [*_held(policy, adapters(model), of_adapters=True)]


def global_names(policy: Policy) -> dict[str, str]:
    """Return the name of each of this rank's parameters with layers and experts numbered over the whole model."""
    layers, names = policy.decoder.layers, [name for name, _ in policy.named_parameters()]
    first_layer = layers[0].layer_number - 1 if layers else 0
    local_experts = len({found[1] for name in names if (found := _EXPERT.search(name))})
    first_expert = policy.pg_collection.ep.rank() * local_experts

    def whole(name: str) -> str:
        name = _LAYER.sub(lambda found: f"decoder.layers.{int(found[1]) + first_layer}.", name)
        return _EXPERT.sub(lambda found: f".local_experts.{int(found[1]) + first_expert}.", name)

    return {name: whole(name) for name in names}


def _held(policy: Policy, known: Mapping[str, Weight], *, of_adapters: bool) -> Iterator[Held]:
    groups, names = policy.pg_collection, global_names(policy)
    for name, parameter in policy.named_parameters():
        if is_adapter(name) != of_adapters:
            continue
        expert = ".experts." in name
        ranks, copies = (groups.expt_tp, groups.expt_dp) if expert else (groups.tp, groups.dp_cp)
        yield Held(names[name], known[names[name]], parameter.detach(), ranks, copies)


_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
