"""Every needed element arrives once, from a rank that holds it, whatever the two layouts."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.generate.refit.plan import Box, Move, cut, plan_moves, rounds_of, shares_of
from megatron_rl.model.sharded_names import weight_name

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


def layouts(ranks: int) -> list[tuple[int, int, int]]:
    found = product((1, 2, 4), (1, 2, 3, 6), range(1, ranks + 1))
    return [sizes for sizes in found if sizes[0] * sizes[1] * sizes[2] == ranks]


PAIRS = st.sampled_from([1, 2, 3, 4, 6, 8, 12]).flatmap(
    lambda ranks: st.tuples(st.sampled_from(layouts(ranks)), st.sampled_from([s for s in layouts(ranks) if s[0] == 1]))
)
"""Layouts of training and of generation over the same ranks: (stages, tensor, copies)."""


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


@examples(15)
@given(PAIRS, st.integers(4, 400))
def test_rounds_deliver_the_same_and_keep_the_limit(pair: Any, limit: int) -> None:
    held, needed = (layout(*sizes) for sizes in pair)
    moves = plan_moves(held, needed)
    rounds = rounds_of(moves, limit)
    for round_ in rounds:
        for rank in range(len(held)):
            assert sum(move.box.bytes for move in round_ if move.source == rank) <= limit
            assert sum(move.box.bytes for move in round_ if move.target == rank) <= limit
    own = [move for move in moves if move.source == move.target]
    tensors = whole()
    for boxes in carry_out(own + [move for round_ in rounds for move in round_], held, needed):
        for one, content in boxes.items():
            assert torch.equal(content, part_of(tensors[one.key], one))


@examples(15)
@given(PAIRS)
def test_a_rank_is_not_sent_what_it_holds(pair: Any) -> None:
    held, needed = (layout(*sizes) for sizes in pair)
    for move in plan_moves(held, needed):
        if move.held in held[move.target]:
            assert move.source == move.target


def test_copies_of_the_trainer_share_the_sending() -> None:
    """Two stages with four copies each, to replicas that need both: the copies of a stage send equal shares."""
    held, needed = layout(2, 1, 4), layout(1, 1, 8)
    sent = [0] * 8
    for move in plan_moves(held, needed):
        if move.source != move.target:
            sent[move.source] += move.box.bytes
    assert max(sent) < 1.5 * sum(sent) / 8


def test_a_box_larger_than_the_limit_is_split_along_its_first_axes() -> None:
    whole_box = box("w", (2, 4, 0), (1, 3, 8))
    parts = list(cut(whole_box, 5))
    assert sum(part.elements for part in parts) == whole_box.elements
    assert all(part.elements <= 5 for part in parts)
    assert parts[0] == box("w", (2, 4, 0), (1, 1, 5))


def test_a_box_that_no_rank_holds_is_named() -> None:
    with pytest.raises(ValueError, match=r"layers.linear \[1, 6, 5\] at \[3, 0, 0\], which rank 0 .* 0 of its 30"):
        plan_moves(
            [[box("decoder.layers.linear", (2, 0, 0), (1, 6, 5))]],
            [[box("decoder.layers.linear", (3, 0, 0), (1, 6, 5))]],
        )
    with pytest.raises(ValueError, match="unknown"):
        plan_moves([[]], [[box("unknown", (0,), (1,))]])


def test_a_refit_does_not_convert() -> None:
    with pytest.raises(ValueError, match=r"w is torch.float32 in training and torch.bfloat16 in generation"):
        plan_moves([[box("w", (0,), (4,))]], [[box("w", (0,), (4,), torch.bfloat16)]])


def test_shares_cover_the_model_once_and_keep_each_weight_whole() -> None:
    held = layout(2, 2, 2)
    shares = shares_of(held, 3)
    boxes = [box for share in shares for box in share]
    assert len(boxes) == len({*boxes}) and {*boxes} == {box for rank in held for box in rank}
    weights = [{weight_name(box.key, box.offset) for box in share} for share in shares]
    assert sum(map(len, weights)) == len(set().union(*weights)) == 2 * 4 + 1


def test_shares_are_equal_on_all_members_and_of_nearly_equal_size() -> None:
    layers = [box("decoder.layers.mlp.linear_fc2.weight", (layer, 0, 0), (1, 64, 64)) for layer in range(31)]
    embedding = box("embedding", (0, 0), (256, 64))
    shares = shares_of([layers[:16], [*layers[16:], embedding]], 4)
    assert [*map(set, shares_of([[embedding], [*reversed(layers)]], 4))] == [*map(set, shares)]
    sizes = [sum(each.bytes for each in share) for share in shares]
    assert max(sizes) - min(sizes) <= layers[0].bytes
