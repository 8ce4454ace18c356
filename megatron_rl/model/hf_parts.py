"""One rank's weights as parts of Hugging Face's tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from megatron_rl.model.config import ModelConfig
from megatron_rl.model.hf_mapping import Piece, Weight, pieces, weights
from megatron_rl.model.policy import Policy


@dataclass(frozen=True, slots=True)
class Held:
    """A weight of which this rank has all or a part."""

    name: str
    """megatron-core's name, with layers and experts numbered over the whole model."""
    weight: Weight
    tensor: Tensor
    """This rank's part: the memory of its parameter."""
    ranks: dist.ProcessGroup
    """Ranks that together have the weight."""
    copies: dist.ProcessGroup
    """Ranks with the same part."""

    def pieces(self) -> Iterator[Piece]:
        """Locate Hugging Face's tensors in this rank's part. Pieces may be empty if it is all padding."""
        return pieces(self.weight, self.tensor, self.ranks.rank(), self.ranks.size())


def held_weights(policy: Policy, model: ModelConfig) -> list[Held]:
    """Return all weights of this rank's part of a policy, in the order that its tensor-parallel ranks share."""
    whole = model if model.vocab_size is not None else model.model_copy(update={"vocab_size": policy.vocabulary})
    found, groups, names = weights(whole), policy.pg_collection, _GlobalNames(policy)
    held = []
    for name, parameter in policy.named_parameters():
        expert = ".experts." in name
        ranks, copies = (groups.expt_tp, groups.expt_dp) if expert else (groups.tp, groups.dp_cp)
        global_name = names.of(name)
        held.append(Held(global_name, found[global_name], parameter.detach(), ranks, copies))
    return held


class _GlobalNames:
    """Names of a rank's parameters, with layers and experts numbered over the whole model."""

    def __init__(self, policy: Policy) -> None:
        self._first_layer = policy.decoder.layers[0].layer_number - 1 if policy.decoder.layers else 0
        self._ep_rank = policy.pg_collection.ep.rank()
        local = {int(found[1]) for name, _ in policy.named_parameters() if (found := _EXPERT.search(name))}
        self._local_experts = len(local)

    def of(self, name: str) -> str:
        first_expert = self._ep_rank * self._local_experts
        name = _LAYER.sub(lambda found: f"decoder.layers.{int(found[1]) + self._first_layer}.", name)
        return _EXPERT.sub(lambda found: f".local_experts.{int(found[1]) + first_expert}.", name)


_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
