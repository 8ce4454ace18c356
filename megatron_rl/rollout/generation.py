"""Running agents beside an engine: on the rank that drives a replica, while its other ranks follow."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from megatron_rl.inference.api import RankEngine
from megatron_rl.rank.safe_points import SafePoints
from megatron_rl.rollout.stream import shares

Result = TypeVar("Result")


def complete(runner: asyncio.Runner, work: Coroutine[Any, Any, Result]) -> Result:
    """What `work` returns. `Runner.run` would also set its handler of SIGINT for the while, which the signal module
    prints with all that its task holds: a millisecond of each step."""
    return runner.get_loop().run_until_complete(work)


class DriverPlace(Protocol):
    """This rank's among those that run agents."""

    @property
    def index(self) -> int:
        """Of the driver that this rank is or follows, among `count`."""
        ...

    @property
    def count(self) -> int: ...

    @property
    def drives(self) -> bool: ...


class AgentLoop(ABC):
    """The one asyncio loop of a rank, in which its agents run."""

    def __init__(self, place: DriverPlace, safe_points: SafePoints, runner: asyncio.Runner) -> None:
        self._place = place
        self._safe_points = safe_points
        self._runner = runner

    def share(self, start: int, count: int) -> range:
        """Which of [start, start + count) this rank answers, one of the drivers among which they are shared out; none
        where it follows one."""
        if not self._place.drives:
            return range(start, start)
        return shares(start, count, self._place.count)[self._place.index]

    @abstractmethod
    def run(self, work: Callable[[], Coroutine[Any, Any, Result]], sign_of_life: Callable[[], object]) -> Result | None:
        """What `work` returns, on a rank that drives; None where it was given up because that rank was asked to leave,
        and on those that follow. Collective.

        sign_of_life: see SafePoints.run_until_asked.
        """

    def end(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have the agents do what they do last, when nothing is under way."""
        self._runner.run(last())

    def close(self) -> None:
        self._runner.close()


class EngineLoop(AgentLoop):
    """Agents and an engine of this rank take turns; the other ranks of the engine execute what the agents of the first
    have it do."""

    def __init__(self, place: DriverPlace, engine: RankEngine, safe_points: SafePoints, runner: asyncio.Runner) -> None:
        super().__init__(place, safe_points, runner)
        self._engine = engine

    def run(self, work: Callable[[], Coroutine[Any, Any, Result]], sign_of_life: Callable[[], object]) -> Result | None:
        """See AgentLoop.run. Collective over a replica of the engine.

        A driver that fails tells its followers nothing: they lose the connection when it is gone.
        """
        result = None
        if self._place.drives:
            result = complete(self._runner, self._safe_points.run_until_asked(work(), sign_of_life))
            self._engine.let_go()
        else:
            self._engine.follow(self._safe_points.activity.waits)
        self._engine.end_phase()
        return result
