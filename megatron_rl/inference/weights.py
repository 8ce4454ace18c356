"""New weights for an engine, from tensors by their Hugging Face names."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from megatron_rl.inference.api import Unsupported
from megatron_rl.model.config import ModelConfig
from megatron_rl.model.hf_mapping import HF_OUTPUT, Piece
from megatron_rl.model.hf_parts import held_weights
from megatron_rl.model.policy import Policy


class WrongWeights(ValueError):
    """A set of tensors is not that of the model."""


class IncomingWeights:
    """One whole set of tensors on its way into this rank's part of a policy."""

    def __init__(self, policy: Policy, model: ModelConfig) -> None:
        """Raises Unsupported where the weights are the trainer's own."""
        if any(parameter.requires_grad for parameter in policy.parameters()):
            raise Unsupported("update_weights: this engine samples by the trainer's own weights")
        self._tied = model.tied_embeddings
        self._places: dict[str, list[Piece]] = defaultdict(list)
        self._shapes: dict[str, tuple[int, ...]] = {}
        for held in held_weights(policy, model):
            self._shapes |= {source.name: source.shape for source in held.weight.sources}
            for piece in held.pieces():
                self._places[piece.source.name].append(piece)
        self._missing = set(self._shapes)

    def check(self, name: str, tensor: Tensor) -> bool:
        """Whether the model has a place for a tensor: none for an output layer that says what the embedding does.

        Raises WrongWeights where it is no tensor of the model, of another shape, or was there before.
        """
        if name == HF_OUTPUT and self._tied:
            return False
        if name not in self._shapes:
            raise WrongWeights(f"the model has no tensor {name}")
        if tuple(tensor.shape) != self._shapes[name]:
            raise WrongWeights(f"{name} is {[*tensor.shape]}, and of the model it is {[*self._shapes[name]]}")
        if name not in self._missing:
            raise WrongWeights(f"{name} came twice")
        return True

    @torch.no_grad()
    def put(self, name: str, tensor: Tensor) -> None:
        """Take over what this rank has of a tensor, in the model's own type."""
        for piece in self._places[name]:
            if piece.view.numel():  # a rank may have nothing but padding
                piece.view.copy_(tensor[piece.index].reshape(piece.view.shape))
        # A rank that follows is told of tensors alone: of the next set too, where nothing was computed by this one.
        self._missing.discard(name)

    def finish(self) -> None:
        """Raises WrongWeights where a tensor has not come."""
        if self._missing:
            some = ", ".join(sorted(self._missing)[:3])
            raise WrongWeights(f"{len(self._missing)} of the model's tensors are missing: {some}")
