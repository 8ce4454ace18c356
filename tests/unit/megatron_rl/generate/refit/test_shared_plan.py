"""Equal replicas share one plan: every element arrives once, in rounds that both ends count alike, evenly sent."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from layouts_of_boxes import carry_out, layout, part_of, whole

from megatron_rl.generate.refit.plan import Box, Move, plan_moves, rounds_of
from megatron_rl.generate.refit.shared_plan import Turn, bytes_moved, place_of, receives_of, sends_of, turns_of

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
        self.turns: list[Turn] = turns_of(zip(replicas, ranges, strict=True), self.senders)
        nothing: list[Box] = []
        self.held = [*held, *[nothing] * sum(replicas)]
        self.needed = [*[nothing] * self.senders, *(boxes for ranks in replicas for boxes in layout(1, ranks, 1))]
        planned = [boxes if rank in self.turns[0] else nothing for rank, boxes in enumerate(self.needed)]
        self.rounds = rounds_of(plan_moves(self.held, planned), limit)
        self.sends = [sends_of(self.rounds, self.turns, rank) for rank in range(self.senders)]
        self.receives = [receives_of(self.rounds, self.turns, rank) for rank in range(self.senders, first)]


@examples(20)
@given(TRAINING, REPLICAS, st.integers(16, 400))
def test_every_replica_gets_what_it_needs_from_ranks_that_send_it(
    training: tuple[int, int, int], replicas: list[int], limit: int
) -> None:
    transfer = Transfer(training, replicas, limit)
    sent = [move for rounds in transfer.sends for moves in rounds for move in moves]
    received = [move for rounds in transfer.receives for moves in rounds for move in moves]
    assert Counter(sent) == Counter(received)
    assert sum(move.box.bytes for move in sent) == bytes_moved(transfer.rounds, transfer.turns)
    tensors = whole()
    for boxes in carry_out(received, transfer.held, transfer.needed):
        for one, content in boxes.items():
            assert content.equal(part_of(tensors[one.key], one))


@examples(20)
@given(TRAINING, REPLICAS, st.integers(16, 400))
def test_no_rank_sends_or_receives_more_than_the_limit_at_once(
    training: tuple[int, int, int], replicas: list[int], limit: int
) -> None:
    transfer = Transfer(training, replicas, limit)
    for moves in (moves for rounds in (*transfer.sends, *transfer.receives) for moves in rounds):
        assert sum(move.box.bytes for move in moves) <= limit


@examples(20)
@given(TRAINING, REPLICAS, st.integers(16, 400))
def test_two_ranks_exchange_in_the_same_order(training: tuple[int, int, int], replicas: list[int], limit: int) -> None:
    """Ranks name no rounds, so the n-th package from one to another must be the same at both ends; and ranks that wait
    for one another in a circle would wait for ever."""
    transfer = Transfer(training, replicas, limit)
    packages: dict[tuple[int, int], list[list[Move]]] = defaultdict(list)
    for rounds in transfer.sends:
        for moves in rounds:
            for target in dict.fromkeys(move.target for move in moves):
                packages[moves[0].source, target].append([move for move in moves if move.target == target])
    waiting = [[*rounds] for rounds in (*transfer.sends, *transfer.receives)]
    while any(waiting):
        heads = [rounds[0] if rounds else [] for rounds in waiting]
        offered = {move for moves in heads[: transfer.senders] for move in moves}
        done = [set(moves) <= offered for moves in heads[transfer.senders :]]
        taken = {move for moves, ends in zip(heads[transfer.senders :], done, strict=True) if ends for move in moves}
        for rank, moves in enumerate(heads):
            if moves and taken:
                waiting[rank][0] = [move for move in moves if move not in taken]
                if not waiting[rank][0]:
                    waiting[rank].pop(0)
        assert taken, "all wait for one another"
    for rank, rounds in enumerate(transfer.receives, transfer.senders):
        for moves in rounds:
            for source in dict.fromkeys(move.source for move in moves):
                assert packages[source, rank].pop(0) == [move for move in moves if move.source == source]


def test_as_many_replicas_are_planned_as_there_are_senders_and_the_rest_takes_their_places() -> None:
    kinds = ["tp2", "tp2", "tp1", "tp2", "tp2", "tp2"]
    ranges = [range(4, 6), range(6, 8), range(8, 9), range(9, 11), range(11, 13), range(13, 15)]
    first, second, third = turns_of(zip(kinds, ranges, strict=True), 4)
    assert first == {rank: rank for rank in range(4, 9)}
    assert second == {4: 9, 5: 10, 6: 11, 7: 12}
    assert third == {4: 13, 5: 14}
    assert place_of([first, second, third], 12) == 7


def test_copies_of_the_trainer_send_equally_to_many_replicas() -> None:
    transfer = Transfer((2, 1, 4), [1] * 40, 10**6)
    sent = [sum(move.box.bytes for moves in rounds for move in moves) for rounds in transfer.sends]
    assert max(sent) < 1.2 * sum(sent) / len(sent)
