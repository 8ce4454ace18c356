"""Context-parallel ranks divide the tokens of a micro-batch evenly and completely."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.algorithms.context import ContextPart, context_part, cut
from megatron_rl.algorithms.packing import MicroBatch, pack
from megatron_rl.model.platform.attention import whole_sequences

RANKS = st.integers(1, 5)
PROMPT = st.lists(st.integers(3, 9), min_size=1, max_size=12)
ANSWERS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=5)


@st.composite
def micro_batches(draw: st.DrawFn) -> MicroBatch:
    """Trees of answers that often share prefixes."""
    drawn = draw(st.lists(st.tuples(PROMPT, ANSWERS), min_size=1, max_size=4))
    rows = [(prompt, answer) for prompt, answers in drawn for answer in answers]
    masks = [[False] * len(prompt) + [True] * len(answer) for prompt, answer in rows]
    (made,) = pack([prompt + answer for prompt, answer in rows], masks, range(len(rows)), 10**6)
    return made


def parts_of(batch: MicroBatch, ranks: int) -> list[ContextPart]:
    return [context_part(batch, rank, ranks) for rank in range(ranks)]


@given(micro_batches(), RANKS)
def test_every_token_is_on_one_rank_and_gathering_restores_the_order(batch: MicroBatch, ranks: int) -> None:
    parts = parts_of(batch, ranks)
    gathered = torch.cat([part.tokens for part in parts])
    packed = torch.full_like(gathered, -1).index_copy_(0, parts[0].indices_of_ranks.flatten(), gathered)
    assert torch.equal(packed[: len(batch.tokens)], batch.tokens)
    for part in parts:
        assert torch.equal(part.indices_of_ranks, parts[0].indices_of_ranks)
        real = part.indices < len(batch.tokens)
        assert torch.equal(part.positions[real], batch.positions[part.indices[real]])
        assert (part.indices.diff() > 0).all()


@given(micro_batches(), RANKS)
def test_ranks_have_equally_many_tokens_with_less_than_one_padding_token_each(batch: MicroBatch, ranks: int) -> None:
    """Padding tokens are their own trees."""
    parts = parts_of(batch, ranks)
    assert len({len(part.tokens) for part in parts}) == 1
    whole, end = parts[0].whole, len(batch.tokens)
    added = len(whole.subtree_ends) - end
    assert 0 <= added < ranks
    assert whole.cu_seqlens.tolist() == [*batch.cu_seqlens.tolist(), *range(end + 1, end + added + 1)]
    assert whole.subtree_ends.tolist() == [*batch.subtree_ends.tolist(), *range(end + 1, end + added + 1)]


@given(micro_batches(), RANKS)
def test_every_trained_token_is_predicted_once_by_the_rank_of_its_predecessor(batch: MicroBatch, ranks: int) -> None:
    predicting = dict(zip(batch.trained.tolist(), batch.select.tolist(), strict=True))
    target = dict(zip(batch.trained.tolist(), batch.targets.tolist(), strict=True))
    found = []
    for part in parts_of(batch, ranks):
        for place, token, trained in zip(part.select, part.targets, part.trained, strict=True):
            assert part.indices[place] == predicting[int(trained)]
            assert token == target[int(trained)]
            found.append(int(trained))
    assert sorted(found) == sorted(predicting)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=6), st.integers(2, 5))
def test_each_rank_has_equally_many_early_and_late_tokens_of_every_sequence(lengths: list[int], ranks: int) -> None:
    """So pairs of a token and one that it attends to differ between ranks by less than those of a few tokens, and not
    by a share of all, which grows with the square of the length."""
    lengths = [*lengths, -sum(lengths) % ranks + ranks]
    indices = cut(whole_sequences(lengths).cu_seqlens, ranks)
    for first, stop in pairwise(whole_sequences(lengths).cu_seqlens.tolist()):
        of_ranks = [of_rank[(of_rank >= first) & (of_rank < stop)] - first + 1 for of_rank in indices]
        pairs = [int(seen.sum()) for seen in of_ranks]
        assert max(pairs) - min(pairs) <= 2 * (stop - first)
        assert max(map(len, of_ranks)) - min(map(len, of_ranks)) <= 1


def test_long_sequence_gives_each_rank_a_chunk_from_the_front_and_one_from_the_end() -> None:
    indices = cut(whole_sequences([12]).cu_seqlens, 3)
    assert indices.tolist() == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]


def test_micro_batch_without_tokens_to_train_on_has_a_token_for_each_rank() -> None:
    for part in parts_of(MicroBatch.empty(), 4):
        assert (len(part.tokens), len(part.targets)) == (1, 0)
