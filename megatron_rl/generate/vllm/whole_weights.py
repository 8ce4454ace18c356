"""Hugging Face's tensors from the boxes of megatron-core's sharded state. No megatron-core."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set

import torch
from torch import Tensor

from megatron_rl.generate.refit.plan import Box, ModelStage
from megatron_rl.model.hf_mapping import matrices_of
from megatron_rl.model.hf_weights import OUTPUT, weights
from megatron_rl.model.lora_mapping import LORA_A, LORA_B, adapters, matrices, merged
from megatron_rl.model.sharded_names import leading_axes, weight_name
from megatron_rl.recipe.model import ModelConfig

Parts = Mapping[Box, Tensor]
"""Parts of one weight, or of one matrix of an adapter: all of them, each in the shape of its box."""


class WholeWeights:
    """Composes the weights of a model."""

    def __init__(
        self, model: ModelConfig, vocabulary: int, device: torch.device | None = None, stage: ModelStage | None = None
    ) -> None:
        """
        vocabulary: tokens of the model, without the rows that pad the embedding.
        device: where to compose and merge the tensors; default: where the parts are.
        stage: whose weights are wanted; None: those of the whole model.
        """
        self._model, self._device = model, device
        self._of_adapters = adapters(model)
        known = weights(model.model_copy(update={"vocab_size": vocabulary}))
        wanted = (name for name in known if name != OUTPUT or not model.tied_embeddings)
        self.expected = {name: known[name] for name in wanted if stage is None or stage.has(name)}
        """Weights that Hugging Face's tensors come from. The output layer of tied embeddings is left out."""
        self._names = known.keys() | self._of_adapters.keys()

    def check(self, sent: Set[str]) -> None:
        """Raise ValueError unless the weights that were sent, with or without the matrices of adapters, are a model."""
        if unknown := sent - self._names:
            raise ValueError(f"Hugging Face has no weight {min(unknown)}")
        if missing := self.expected.keys() - sent:
            raise ValueError(f"no training rank has sent {min(missing)}")

    def adapter_of(self, name: str) -> tuple[str, ...]:
        """Names of the matrices of a weight's adapter; empty without one."""
        linear = name.removesuffix(".weight")
        pair = tuple(f"{linear}.{matrix}" for matrix in (LORA_A, LORA_B))
        return pair if self._model.lora and pair[0] in self._of_adapters else ()

    def compose(self, name: str, parts: Mapping[str, Parts]) -> list[Tensor]:
        """The sources of a weight, merged with its adapter. They share no memory with the parts.

        parts: of the weight, and of each matrix of its adapter. Raises ValueError if some are missing.
        """
        weight = self.expected[name]
        whole = self._joined(name, parts)
        found = [matrix.clone() for matrix in matrices_of(weight, whole[: weight.shape[0]])]
        if pair := self.adapter_of(name):
            a, b = (matrices(self._of_adapters[each], self._joined(each, parts)) for each in pair)
            assert self._model.lora is not None
            found = merged(weight, found, a, b, self._model.lora)
        return found

    def _joined(self, name: str, parts: Mapping[str, Parts]) -> Tensor:
        """Join the parts of one weight, without the axes that count layers and experts."""
        return _joined(name, parts.get(name) or {}).to(self._device)


def by_name(boxes: Mapping[Box, Tensor]) -> dict[str, dict[Box, Tensor]]:
    """Parts of each weight, and of each matrix of an adapter. boxes: tensors in the shape of their boxes."""
    parts: dict[str, dict[Box, Tensor]] = defaultdict(dict)
    for box, part in boxes.items():
        parts[weight_name(box.key, box.offset)][box] = part
    return dict(parts)


def _joined(name: str, parts: Parts) -> Tensor:
    if not parts:
        raise ValueError(f"{name} is missing")
    axes = leading_axes(next(iter(parts)).key)
    ends = [[start + size for start, size in zip(box.offset, box.shape, strict=True)][axes:] for box in parts]
    shape = [max(of_axis) for of_axis in zip(*ends, strict=True)]
    if sum(box.elements for box in parts) != torch.Size(shape).numel():
        raise ValueError(f"{name} {shape} is incomplete: {len(parts)} of its parts are here")
    first = next(iter(parts.values()))
    if len(parts) == 1:
        return first.view(shape)
    whole = first.new_empty(shape)
    for box, part in parts.items():
        index = tuple(slice(at, at + size) for at, size in zip(box.offset[axes:], box.shape[axes:], strict=True))
        whole[index] = part.view(box.shape[axes:])
    return whole
