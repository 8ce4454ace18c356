"""Boxes of a small model's tensors in several layouts, and moves carried out on them."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from megatron_rl.generate.refit.plan import Box, Move

KEYS = {"decoder.layers.linear": (4, 6, 5), "decoder.layers.norm": (4, 6), "embedding": (12, 3)}
"""Whole tensors of a model of four layers; the first axis of those of layers is the layer."""


def box(key: str, offset: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Box:
    return Box(key, dtype, offset, shape)


def layout(stages: int, tensor: int, copies: int) -> list[list[Box]]:
    """Boxes of each rank in megatron-core's order: neighbours share a layer, stages are far apart.

    As in its sharded states, each layer's tensor is a box, each tensor-parallel rank has the norm, and the first and
    last stage have the tied embedding.
    """
    ranks = []
    for stage, _copy, part in product(range(stages), range(copies), range(tensor)):
        boxes = []
        for layer in range(4 * stage // stages, 4 * (stage + 1) // stages):
            rows = 6 // tensor
            boxes.append(box("decoder.layers.linear", (layer, part * rows, 0), (1, rows, 5)))
            boxes.append(box("decoder.layers.norm", (layer, 0), (1, 6)))
        if stage in (0, stages - 1):
            rows = 12 // tensor
            boxes.append(box("embedding", (part * rows, 0), (rows, 3)))
        ranks.append(boxes)
    return ranks


def whole() -> dict[str, Tensor]:
    count = 0
    tensors = {}
    for key, shape in KEYS.items():
        tensors[key] = torch.arange(count, count + torch.Size(shape).numel(), dtype=torch.float32).view(shape)
        count += tensors[key].numel()
    return tensors


def part_of(tensor: Tensor, one: Box) -> Tensor:
    return tensor[one.within(box(one.key, (0,) * tensor.dim(), tuple(tensor.shape)))]


def carry_out(moves: list[Move], held: list[list[Box]], needed: list[list[Box]]) -> list[dict[Box, Tensor]]:
    """Carry out the moves. Elements that none filled are NaN; filling one twice fails."""
    tensors = whole()
    have = [{one: part_of(tensors[one.key], one) for one in boxes} for boxes in held]
    want = [{one: torch.full(one.shape, torch.nan) for one in boxes} for boxes in needed]
    for move in moves:
        place = want[move.target][move.needed][move.box.within(move.needed)]
        assert place.isnan().all(), f"{move.box} came twice"
        place.copy_(have[move.source][move.held][move.box.within(move.held)])
    return want
