"""Hugging Face's tensors from the boxes of megatron-core's sharded state. No megatron-core."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from megatron_rl.generate.refit.plan import Box
from megatron_rl.model.hf_mapping import OUTPUT, pieces, weights
from megatron_rl.model.lora_mapping import LORA_A, LORA_B, adapters, add, deltas, matrices
from megatron_rl.model.sharded_names import leading_axes, weight_name
from megatron_rl.recipe.model import ModelConfig


def hugging_face_tensors(
    boxes: Mapping[Box, Tensor], model: ModelConfig, vocabulary: int, device: torch.device | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of all Hugging Face tensors that the boxes contain, layer after layer, merged with their
    adapters.

    Tensors may be views of the boxes. The output layer of a model with tied embeddings is left out.

    Args:
        boxes: the parts of each weight, and of its adapter, all of them or none, each tensor in the shape of its box.
        vocabulary: tokens of the model, without the rows that pad the embedding.
        device: where to compose and merge the tensors; default: where the boxes are.

    Raises:
        ValueError: a weight is unknown, or incomplete.
    """
    parts: dict[str, dict[Box, Tensor]] = defaultdict(dict)
    for box, part in boxes.items():
        parts[weight_name(box.key, box.offset)][box] = part
    known, of_adapters = weights(model.model_copy(update={"vocab_size": vocabulary})), adapters(model)
    if unknown := parts.keys() - known.keys() - of_adapters.keys():
        raise ValueError(f"Hugging Face has no weight {min(unknown)}")
    for name, weight in known.items():
        if name not in parts or (name == OUTPUT and model.tied_embeddings):
            continue
        whole = _joined(name, parts[name]).to(device)
        tensors = {source.name: whole.new_empty(source.shape) for source in weight.sources}
        for piece in pieces(weight, whole):
            place = tensors[piece.source.name][piece.index]
            place.copy_(piece.view.reshape(place.shape))
        linear = name.removesuffix(".weight")
        pair = [f"{linear}.{matrix}" for matrix in (LORA_A, LORA_B)]
        if model.lora and pair[0] in of_adapters:
            a, b = (matrices(of_adapters[each], _joined(each, parts[each]).to(device)) for each in pair)
            for changed, delta in deltas(a, b, model.lora):
                tensors[changed] = add(tensors[changed], delta)
        yield from tensors.items()


def _joined(name: str, parts: Mapping[Box, Tensor]) -> Tensor:
    """Join the parts of one weight, without the axes that count layers and experts."""
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
