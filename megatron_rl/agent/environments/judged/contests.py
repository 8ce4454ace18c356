"""Contests between the answers of a group, from matches to a reward for each. No I/O but the given match."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import combinations
from random import Random

from megatron_rl.agent.scoring import NotJudged

Match = Callable[[int, int], Awaitable[float]]
"""Score of the first of two players against the second: 1 for a win, 0 for a loss, 0.5 for a tie. Raises NotJudged."""
Outcome = float | NotJudged
ALONE = "no comparison with another answer was possible"


async def all_against_all(players: int, match: Match) -> list[Outcome]:
    """Return each player's mean score over its matches. A match without a result does not count; a player without any
    is not judged."""
    scores: list[list[float]] = [[] for _ in range(players)]
    why = NotJudged(ALONE)
    pairs = [*combinations(range(players), 2)]
    for (one, other), score in zip(pairs, await _results(match, pairs), strict=True):
        if isinstance(score, NotJudged):
            why = score
        else:
            scores[one].append(score)
            scores[other].append(1 - score)
    return [sum(its) / len(its) if its else why for its in scores]


async def knockout(players: int, match: Match, key: int) -> list[Outcome]:
    """Return the share of rounds that each player survives: 1 for the winner. Both players of a match without a result
    are not judged, and neither is one who met nobody.

    key: decides the draw, who has a bye when the number of players is odd, and who goes on after a tie.
    """
    draw = Random(key)
    left = draw.sample(range(players), players)
    survived = [0] * players
    failed: dict[int, NotJudged] = {}
    met: set[int] = set()
    rounds = 0
    while len(left) > 1:
        rounds += 1
        pairs = [*zip(left[::2], left[1::2], strict=False)]
        going_on = [left[-1]] if len(left) % 2 else []
        for (one, other), score in zip(pairs, await _results(match, pairs), strict=True):
            if isinstance(score, NotJudged):
                failed |= {one: score, other: score}
            else:
                met |= {one, other}
                going_on.append(one if score > 0.5 or (score == 0.5 and draw.random() < 0.5) else other)
        for player in going_on:
            survived[player] += 1
        left = draw.sample(going_on, len(going_on))
    alone = NotJudged(ALONE)
    return [failed.get(player) or (survived[player] / rounds if player in met else alone) for player in range(players)]


async def _results(match: Match, pairs: Sequence[tuple[int, int]]) -> list[Outcome]:
    async def result(one: int, other: int) -> Outcome:
        try:
            return await match(one, other)
        except NotJudged as error:
            return error

    return await asyncio.gather(*(result(*pair) for pair in pairs))
