"""Running agents whose work outlives a step: beside the training, or, where the ranks that train generate, in turn."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from megatron_rl.inference.api import RankEngine
from megatron_rl.rank.safe_points import SafePoints
from megatron_rl.rollout.generation import DriverPlace, complete

Result = TypeVar("Result")


class LastingLoop(ABC):
    """The asyncio loop of a driver's agents, whose tasks outlive a step."""

    place: DriverPlace
    spare_s: float
    """Seconds for which agents go on whose share of a batch is done, while that of other drivers is waited for."""

    @abstractmethod
    def do(self, work: Callable[[asyncio.AbstractEventLoop], Result]) -> Result:
        """What `work` returns, called with the loop, of whose tasks none runs meanwhile. On a rank that drives."""

    @abstractmethod
    def advance(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Let the agents get on until `work` is done, on a rank that drives. Collective over the ranks that generate
        together."""

    @abstractmethod
    def pause(self) -> None:
        """A batch is complete: make room for training on it. Collective over the ranks that generate together."""

    @property
    @abstractmethod
    def starved(self) -> bool:
        """Whether what was asked waits for weights that nobody has."""

    @abstractmethod
    def feed(self) -> None:
        """Have those who answer get the newest weights. Collective over all ranks."""

    @abstractmethod
    def close(self) -> None: ...


class EngineInTurn(LastingLoop):
    """On a rank that trains and generates in turn: while it trains, what is under way has no place in the cache, and
    goes on from its tokens with the next phase."""

    spare_s = 0.05

    def __init__(self, place: DriverPlace, engine: RankEngine, safe_points: SafePoints, runner: asyncio.Runner) -> None:
        """runner: of the loop in which the engine is asked for anything else too."""
        self.place = place
        self._engine, self._safe_points, self._runner = engine, safe_points, runner

    def do(self, work: Callable[[asyncio.AbstractEventLoop], Result]) -> Result:
        """See LastingLoop.do: between two calls of `advance` the loop does not run."""
        return work(self._runner.get_loop())

    def advance(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """See LastingLoop.advance."""
        if self.place.drives:
            complete(self._runner, work())
            self._engine.let_go()
        else:
            self._engine.follow(self._safe_points.activity.waits)

    def pause(self) -> None:
        """See LastingLoop.pause."""
        self._engine.end_phase()

    @property
    def starved(self) -> bool:
        """See LastingLoop.starved: the weights are those of this rank."""
        return False

    def feed(self) -> None:
        """See LastingLoop.feed."""

    def close(self) -> None:
        self._runner.close()
