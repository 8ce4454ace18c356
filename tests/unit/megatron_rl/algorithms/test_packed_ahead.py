"""Packed tokens as a prediction layer reads them, beside each sequence alone."""

from __future__ import annotations

import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.algorithms.packed_ahead import ahead_of
from megatron_rl.algorithms.packing import MicroBatch, pack


def seen_by(batch: MicroBatch, token: int) -> list[int]:
    """Packed tokens that one sees, itself last."""
    start = max(edge for edge in batch.cu_seqlens.tolist() if edge <= token)
    return [key for key in range(start, token + 1) if token < batch.subtree_ends[key]]


sequences = st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=2, max_size=9), st.integers(1, 4)), min_size=1)


@given(sequences)
@examples(50)
def test_each_trained_token_is_predicted_from_its_own_sequence(drawn: list[tuple[list[int], int]]) -> None:
    """The layer reads the pairs of neighbours in the sequence, up to the two tokens before the trained one."""
    tokens = sorted(each for each, _ in drawn)  # answers that share a beginning are neighbours
    masks = [[number >= first for number in range(len(each))] for each, (_, first) in zip(tokens, drawn, strict=True)]
    masks = [[*mask[:-1], True] for mask in masks]
    origin = [(index, at) for index, mask in enumerate(masks) for at, trained in enumerate(mask) if trained]
    for batch in pack(tokens, masks, range(len(tokens)), 12):
        ahead = ahead_of(batch)
        expected = {one for one in batch.trained.tolist() if origin[one][1] > 1}
        assert set(ahead.batch.trained.tolist()) == expected and len(ahead.batch.trained) == len(expected)
        for select, target, trained in zip(ahead.batch.select, ahead.batch.targets, ahead.batch.trained, strict=True):
            index, at = origin[int(trained)]
            seen = seen_by(ahead.batch, int(select))
            read = [(int(batch.tokens[ahead.before[one]]), int(ahead.batch.tokens[one])) for one in seen]
            assert read == [*zip(tokens[index][: at - 1], tokens[index][1:at], strict=True)]
            assert ahead.batch.positions[seen].tolist() == [*range(len(seen))]
            assert target == tokens[index][at]


def test_a_micro_batch_that_predicts_nothing_ahead_stays_one_token() -> None:
    (batch,) = pack([[1, 2]], [[False, True]], [0], 10)
    for each in (batch, MicroBatch.empty()):
        ahead = ahead_of(each)
        assert len(ahead.batch.tokens) == 1 and not len(ahead.batch.select)
        assert torch.equal(ahead.before, torch.zeros(1, dtype=torch.long))
