"""One plan for any number of equal replicas. Pure.

Replicas of one layout need the same boxes, so their moves differ only in who receives. As many of them are planned as
there are training ranks to send; the others take their places in later turns, in the same rounds from the same senders:

    turn 0   replicas 0 1 2 3    planned: senders and rounds are chosen
    turn 1   replicas 4 5 6 7    replica 4 gets what replica 0 got, from the same training ranks
    turn 2   replica  8          ends with the rounds of replica 0

A turn keeps all training ranks as busy as they are in a plan for all replicas at once. A member looks only at its own
moves.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence

from megatron_rl.generate.refit.plan import Move

Turn = Mapping[int, int]
"""Planned rank -> rank that takes its place in this turn."""


def turns_of(replicas: Iterable[tuple[Hashable, range]], senders: int) -> list[Turn]:
    """Assign replicas to turns; the first one maps each planned rank to itself.

    replicas: of each, what is equal for equal replicas, and its ranks.
    """
    planned: dict[Hashable, list[range]] = defaultdict(list)
    waiting: dict[Hashable, list[range]] = defaultdict(list)
    for kind, ranks in replicas:
        full = sum(map(len, planned[kind])) >= senders
        (waiting if full else planned)[kind].append(ranks)
    turns = [{rank: rank for places in planned.values() for ranks in places for rank in ranks}]
    for kind, late in waiting.items():
        places = planned[kind]
        for number, ranks in enumerate(late):
            turn = 1 + number // len(places)
            turns += [{} for _ in range(turn + 1 - len(turns))]
            turns[turn].update(zip(places[number % len(places)], ranks, strict=True))
    return [*turns]


def sends_of(rounds: Sequence[Iterable[Move]], turns: Iterable[Turn], rank: int) -> list[list[Move]]:
    """Moves that a rank sends, by rounds: of the first turn, then of the next ones. Without rounds in which it sends
    nothing."""
    own = [found for moves in rounds if (found := [move for move in moves if move.source == rank])]
    return [found for turn in turns for moves in own if (found := _in_turn(moves, turn))]


def receives_of(rounds: Iterable[Iterable[Move]], turns: Iterable[Turn], rank: int) -> list[list[Move]]:
    """Moves that a rank receives, by rounds. Without rounds in which it receives nothing."""
    place = place_of(turns, rank)
    own = ([move for move in moves if move.target == place] for moves in rounds)
    return [_in_turn(moves, {place: rank}) for moves in own if moves]


def place_of(turns: Iterable[Turn], rank: int) -> int:
    """Planned rank whose place a receiving rank takes."""
    return next(planned for turn in turns for planned, actual in turn.items() if actual == rank)


def bytes_moved(rounds: Iterable[Iterable[Move]], turns: Iterable[Turn]) -> int:
    """Bytes that all ranks send together, in all turns."""
    of_places: Counter[int] = Counter()
    for moves in rounds:
        for move in moves:
            of_places[move.target] += move.box.bytes
    return sum(of_places[place] for turn in turns for place in turn)


def _in_turn(moves: Iterable[Move], turn: Turn) -> list[Move]:
    return [
        Move(move.source, turn[move.target], move.box, move.held, move.needed) for move in moves if move.target in turn
    ]
