"""One plan for any number of equal replicas, which pass the weights on to one another. Pure.

Replicas of one layout need the same boxes. The training ranks send to a few of them, so that each of these ranks sends
no more than one of a replica receives. Each of the others gets the boxes from the replica before it, from worker to
worker, round by round:

    training -> replica 0 -> replica 1 -> replica 2
    training -> replica 3 -> replica 4 -> replica 5

While round 7 is on the way to replica 0, round 6 is on the way to replica 1. So the number of replicas does not change
what any rank sends, and each replica in a chain prolongs a transfer by one round. Only the first ones of chains are
planned. Neighbours in a chain have neighbouring numbers, so that many are on one node.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple, TypeVar

from megatron_rl.generate.refit.plan import Box, Move

Kind = TypeVar("Kind", bound=Hashable)

Chain = tuple[int, ...]
"""Ranks that get the same boxes, each after the first from the one before it."""
Chains = Mapping[int, Chain]
"""Planned rank -> chain that gets what is planned for it."""


class Position(NamedTuple):
    """Place of a receiving rank in its chain."""

    planned: int
    before: int | None
    """Rank that passes the boxes on to this one; None: the training ranks send them."""
    after: int | None
    """Rank that this one passes them on to; None: this is the last one."""


def heads_of(held: Sequence[Iterable[Box]], needed: Iterable[Iterable[Box]]) -> int:
    """Number of equal replicas that get their boxes from the training ranks.

    Ranks with the same box share the sending, so per replica the busiest one sends the sum of its shares.

    held: boxes of each training rank. needed: boxes of each rank of a replica.
    """
    holders = Counter(box for boxes in held for box in boxes)
    sent = max(sum(Fraction(box.bytes, holders[box]) for box in boxes) for boxes in held)
    received = max(sum(box.bytes for box in boxes) for boxes in needed)
    return max(1, int(received / sent)) if sent else 1


def chains_of(replicas: Iterable[tuple[Kind, range]], heads: Callable[[Kind], int], senders: int) -> dict[int, Chain]:
    """Chains of all ranks of replicas. Planned ranks are numbered after the training ranks.

    Args:
        replicas: of each, what is equal for equal replicas, and its ranks.
        heads: see heads_of.
        senders: number of training ranks.
    """
    equal: dict[Kind, list[range]] = defaultdict(list)
    for kind, ranks in replicas:
        equal[kind].append(ranks)
    chains: list[Chain] = []
    for kind, members in equal.items():
        count = min(len(members), heads(kind))
        for first, end in pairwise(len(members) * number // count for number in range(count + 1)):
            chains += zip(*members[first:end], strict=True)
    return dict(enumerate(chains, senders))


def position_of(chains: Chains, rank: int) -> Position:
    planned, chain = next((planned, chain) for planned, chain in chains.items() if rank in chain)
    place = chain.index(rank)
    return Position(planned, chain[place - 1] if place else None, chain[place + 1] if place + 1 < len(chain) else None)


def sends_of(rounds: Iterable[Iterable[Move]], chains: Chains, rank: int) -> list[list[Move]]:
    """Moves that a training rank sends, by rounds. Without rounds in which it sends nothing."""
    own = ([move for move in moves if move.source == rank] for moves in rounds)
    return [[_to(chains[move.target][0], move) for move in moves] for moves in own if moves]


def receives_of(rounds: Iterable[Iterable[Move]], planned: int, rank: int) -> list[list[Move]]:
    """Moves that a rank receives, by rounds, with the training ranks as sources, even if another rank passes them on.
    Without rounds in which it receives nothing, so they are the same throughout a chain."""
    own = ([move for move in moves if move.target == planned] for moves in rounds)
    return [[_to(rank, move) for move in moves] for moves in own if moves]


def bytes_moved(rounds: Sequence[Iterable[Move]], chains: Chains) -> int:
    """Bytes that all ranks send together."""
    return sum(move.box.bytes * len(chains[move.target]) for moves in rounds for move in moves)


def _to(target: int, move: Move) -> Move:
    return Move(move.source, target, move.box, move.held, move.needed)
