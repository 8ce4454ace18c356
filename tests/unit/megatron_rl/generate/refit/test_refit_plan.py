"""Every needed element arrives once, from a rank that holds it, whatever the two layouts."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from layouts_of_boxes import box, carry_out, layout, part_of, whole

from megatron_rl.generate.refit.plan import cut, plan_moves, rounds_of, shares_of
from megatron_rl.model.sharded_names import weight_name


def layouts(ranks: int) -> list[tuple[int, int, int]]:
    found = product((1, 2, 4), (1, 2, 3, 6), range(1, ranks + 1))
    return [sizes for sizes in found if sizes[0] * sizes[1] * sizes[2] == ranks]


PAIRS = st.sampled_from([1, 2, 3, 4, 6, 8, 12]).flatmap(
    lambda ranks: st.tuples(st.sampled_from(layouts(ranks)), st.sampled_from([s for s in layouts(ranks) if s[0] == 1]))
)
"""Layouts of training and of generation over the same ranks: (stages, tensor, copies)."""


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


@examples(15)
@given(PAIRS)
def test_of_the_ranks_that_hold_a_part_the_one_that_has_sent_least_sends_it(pair: Any) -> None:
    """The plain formulation: rank by rank, part by part, over all ranks."""
    held, needed = (layout(*sizes) for sizes in pair)
    sent = [0] * len(held)
    for move in plan_moves(held, needed):
        holders = [rank for rank, boxes in enumerate(held) if move.held in boxes]
        nearest = min(holders, key=lambda rank: (sent[rank], abs(rank - move.target), rank))
        assert move.source == (move.target if move.target in holders else nearest)
        if move.source != move.target:
            sent[move.source] += move.box.bytes


@examples(15)
@given(PAIRS, st.integers(4, 400))
def test_a_part_goes_in_the_first_round_with_room_at_both_ends(pair: Any, limit: int) -> None:
    moves = plan_moves(*(layout(*sizes) for sizes in pair))
    rounds = rounds_of(moves, limit)
    busy: Counter[tuple[int, str, int]] = Counter()
    for number, round_ in enumerate(rounds):
        for move in round_:
            for earlier in range(number):
                ends = busy[earlier, "sends", move.source], busy[earlier, "receives", move.target]
                assert max(ends) + 2 * move.box.bytes > limit, "there was room: levels are powers of two"
            busy[number, "sends", move.source] += move.box.bytes
            busy[number, "receives", move.target] += move.box.bytes


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
