"""Running agents beside an engine: on the rank that drives a replica, while its other ranks follow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from megatron_rl.inference.api import RankEngine
from megatron_rl.rank.engine_ranks import EngineRanks
from megatron_rl.rank.safe_points import SafePoints
from megatron_rl.rollout.stream import shares

Result = TypeVar("Result")


class AgentLoop:
    """The one asyncio loop of a rank, in which its agents and its engine take turns."""

    def __init__(self, ranks: EngineRanks, engine: RankEngine, safe_points: SafePoints, runner: asyncio.Runner) -> None:
        self._ranks = ranks
        self._engine = engine
        self._safe_points = safe_points
        self._runner = runner

    def share(self, start: int, count: int) -> range:
        """Which of [start, start + count) this rank answers, one of the drivers among which they are shared out; none
        where it follows one."""
        if not self._ranks.drives:
            return range(start, start)
        return shares(start, count, self._ranks.count)[self._ranks.index]

    def run(self, work: Callable[[], Coroutine[Any, Any, Result]], sign_of_life: Callable[[], object]) -> Result | None:
        """What `work` returns, on a rank that drives; None where it was given up because that rank was asked to leave,
        and on those that follow, which execute what it has the engine do. Collective over a replica.

        A driver that fails tells its followers nothing: they lose the connection when it is gone.

        sign_of_life: see SafePoints.run_until_asked.
        """
        result = None
        if self._ranks.drives:
            result = self._runner.run(self._safe_points.run_until_asked(work(), sign_of_life))
            self._engine.let_go()
        else:
            self._engine.follow(self._safe_points.activity.waits)
        self._engine.end_phase()
        return result

    def close(self) -> None:
        self._runner.close()
