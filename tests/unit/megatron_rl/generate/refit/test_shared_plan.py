"""Equal replicas share one plan: every element arrives once, and the training ranks send no more for more replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from layouts_of_boxes import box, carry_out, layout, part_of, whole

from megatron_rl.generate.refit.plan import Box, Move, plan_moves, rounds_of
from megatron_rl.generate.refit.shared_plan import (
    Position,
    bytes_moved,
    chains_of,
    heads_of,
    position_of,
    receives_of,
    sends_of,
)

TRAINING = st.sampled_from([(1, 1, 1), (2, 1, 2), (2, 3, 1), (4, 1, 2), (1, 2, 3)])
REPLICAS = st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=14)
"""Tensor-parallel sizes of replicas, in the order of their ranks."""


class Transfer:
    """Moves of all ranks, as each finds its own."""

    def __init__(self, training: tuple[int, int, int], replicas: Sequence[int], limit: int) -> None:
        held = layout(*training)
        self.senders = len(held)
        ranges, first = [], self.senders
        for ranks in replicas:
            ranges.append(range(first, first + ranks))
            first += ranks
        heads = {ranks: heads_of(held, layout(1, ranks, 1)) for ranks in replicas}
        self.chains = chains_of(zip(replicas, ranges, strict=True), heads.__getitem__, self.senders)
        nothing: list[Box] = []
        self.held = [*held, *[nothing] * sum(replicas)]
        self.needed = [*[nothing] * self.senders, *(boxes for ranks in replicas for boxes in layout(1, ranks, 1))]
        planned = [self.needed[chain[0]] for chain in self.chains.values()]
        self.rounds = rounds_of(plan_moves(held, [*[nothing] * self.senders, *planned]), limit)
        self.positions = {rank: position_of(self.chains, rank) for rank in range(self.senders, first)}
        self.sends = [sends_of(self.rounds, self.chains, rank) for rank in range(self.senders)]
        self.receives = {rank: receives_of(self.rounds, each.planned, rank) for rank, each in self.positions.items()}

    @property
    def sent(self) -> list[int]:
        """Bytes that each training rank sends."""
        return [sum(move.box.bytes for move in joined(rounds)) for rounds in self.sends]


def joined(rounds: Iterable[Iterable[Move]]) -> list[Move]:
    return [move for moves in rounds for move in moves]


@examples(10)
@given(TRAINING, REPLICAS, st.integers(16, 400))
def test_every_replica_gets_what_it_needs_once(training: tuple[int, int, int], replicas: list[int], limit: int) -> None:
    transfer = Transfer(training, replicas, limit)
    received = [move for rounds in transfer.receives.values() for move in joined(rounds)]
    tensors = whole()
    for boxes in carry_out(received, transfer.held, transfer.needed):
        for one, content in boxes.items():
            assert content.equal(part_of(tensors[one.key], one))
    assert bytes_moved(transfer.rounds, transfer.chains) == sum(move.box.bytes for move in received)


@examples(10)
@given(TRAINING, REPLICAS, st.integers(16, 400))
def test_the_first_of_a_chain_receives_what_training_ranks_send_and_each_other_one_the_same_rounds(
    training: tuple[int, int, int], replicas: list[int], limit: int
) -> None:
    transfer = Transfer(training, replicas, limit)
    firsts = [chain[0] for chain in transfer.chains.values()]
    sent = [move for rounds in transfer.sends for move in joined(rounds)]
    assert Counter(sent) == Counter(move for rank in firsts for move in joined(transfer.receives[rank]))
    for chain in transfer.chains.values():
        links = [transfer.positions[rank] for rank in chain]
        assert [each.before for each in links] == [None, *chain[:-1]]
        assert [each.after for each in links] == [*chain[1:], None]
        contents = [[[move.box for move in moves] for moves in transfer.receives[rank]] for rank in chain]
        assert all(each == contents[0] for each in contents)
    assert sorted(rank for chain in transfer.chains.values() for rank in chain) == sorted(transfer.positions)


@examples(10)
@given(TRAINING, REPLICAS, st.integers(16, 400))
def test_no_rank_sends_or_receives_more_than_the_limit_at_once(
    training: tuple[int, int, int], replicas: list[int], limit: int
) -> None:
    transfer = Transfer(training, replicas, limit)
    for moves in (moves for rounds in (*transfer.sends, *transfer.receives.values()) for moves in rounds):
        assert sum(move.box.bytes for move in moves) <= limit


@examples(10)
@given(TRAINING, st.sampled_from([1, 2, 3]), st.integers(1, 9))
def test_the_busiest_training_rank_sends_the_same_to_any_number_of_replicas(
    training: tuple[int, int, int], ranks: int, more: int
) -> None:
    """Once there are enough to keep it as busy as a rank of a replica."""
    heads = heads_of(layout(*training), layout(1, ranks, 1))
    enough = Transfer(training, [ranks] * heads, 100)
    assert Transfer(training, [ranks] * (heads + more), 100).sent == enough.sent
    received = max(sum(move.box.bytes for move in joined(rounds)) for rounds in enough.receives.values())
    alone = Transfer(training, [ranks], 100)
    assert max(enough.sent) <= max(1.2 * received, *alone.sent)


def test_equal_replicas_follow_one_another_in_a_few_chains() -> None:
    kinds = ["tp2", "tp2", "tp1", "tp2", "tp2", "tp2"]
    ranges = [range(4, 6), range(6, 8), range(8, 9), range(9, 11), range(11, 13), range(13, 15)]
    chains = chains_of(zip(kinds, ranges, strict=True), {"tp2": 2, "tp1": 4}.__getitem__, 4)
    assert chains == {4: (4, 6), 5: (5, 7), 6: (9, 11, 13), 7: (10, 12, 14), 8: (8,)}
    assert position_of(chains, 12) == Position(7, 10, 14)
    assert position_of(chains, 8) == Position(8, None, None)


def test_training_ranks_send_to_as_many_replicas_as_they_can_without_sending_more_than_one_receives() -> None:
    """A stage with the embedding has more to send."""
    layers = [box("layers", (layer, 0), (1, 60)) for layer in range(2)]
    embedding = box("embedding", (0,), (30,))
    assert heads_of([[layers[0]], [layers[1]]], [layers]) == 2
    assert heads_of([[layers[0]], [layers[1]]] * 3, [layers]) == 6
    assert heads_of([[layers[0]], [layers[1]]], [[layers[0]], [layers[1]]]) == 1
    assert heads_of([[layers[0], embedding], [layers[1]]] * 3, [[*layers, embedding]]) == 5


def test_a_loss_does_not_change_what_is_planned() -> None:
    """So that the plan of one epoch is that of the next one."""
    first = chains_of([("tp1", range(rank, rank + 1)) for rank in range(2, 9)], lambda _: 2, 2)
    second = chains_of([("tp1", range(rank, rank + 1)) for rank in range(2, 8)], lambda _: 2, 2)
    assert first.keys() == second.keys() == {2, 3}


def test_copies_of_the_trainer_send_equally_to_many_replicas() -> None:
    sent = Transfer((2, 1, 4), [1] * 40, 10**6).sent
    assert max(sent) < 1.2 * sum(sent) / len(sent)
