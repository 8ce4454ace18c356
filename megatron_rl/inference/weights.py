"""New weights for an engine, from tensors under their Hugging Face names."""

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
    """A set of tensors does not fit the model."""


class IncomingWeights:
    """One complete set of tensors, copied to this rank's part of a policy as it arrives."""

    def __init__(self, policy: Policy, model: ModelConfig) -> None:
        """Raises Unsupported if the weights are the trainer's own."""
        if any(parameter.requires_grad for parameter in policy.parameters()):
            raise Unsupported(
                "update_weights: this engine samples by the trainer's own weights, which it cannot replace"
            )
        self._tied = model.tied_embeddings
        self._pieces: dict[str, list[Piece]] = defaultdict(list)
        self._shapes: dict[str, tuple[int, ...]] = {}
        for held in held_weights(policy, model):
            self._shapes |= {source.name: source.shape for source in held.weight.sources}
            for piece in held.pieces():
                self._pieces[piece.source.name].append(piece)
        self._missing = set(self._shapes)

    def check(self, name: str, tensor: Tensor) -> bool:
        """Return whether the model uses a tensor: not an output layer that is tied to the embedding.

        Raises WrongWeights if the model has no such tensor, if its shape differs, or if it came before.
        """
        if name == HF_OUTPUT and self._tied:
            return False
        if name not in self._shapes:
            raise WrongWeights(f"the model has no tensor {name}")
        if tuple(tensor.shape) != self._shapes[name]:
            raise WrongWeights(f"{name} has shape {[*tensor.shape]}, and the model needs {[*self._shapes[name]]}")
        if name not in self._missing:
            raise WrongWeights(f"{name} came twice")
        return True

    @torch.no_grad()
    def put(self, name: str, tensor: Tensor) -> None:
        """Copy this rank's part of a tensor, in the model's own dtype."""
        for piece in self._pieces[name]:
            if piece.view.numel():  # a rank may have nothing but padding
                piece.view.copy_(tensor[piece.index].reshape(piece.view.shape))
        # A following rank only gets tensors. If it computes nothing in between, this object serves the next set too.
        self._missing.discard(name)

    def finish(self) -> None:
        """Raise WrongWeights if a tensor is missing."""
        if self._missing:
            some = ", ".join(sorted(self._missing)[:3])
            raise WrongWeights(f"{len(self._missing)} of the model's tensors are missing: {some}")
