"""Agents on ranks that only train, while others answer: replicas, or a server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from megatron_rl.rank.groups import Groups
from megatron_rl.rollout.generation import DriverPlace
from megatron_rl.rollout.lasting import LastingLoop

STOP_S = 10.0
"""That the agents' thread has to end."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class TrainingDriver:
    """Implements `DriverPlace` where nothing generates on the ranks that train: the first rank of each of their
    data-parallel replicas drives."""

    index: int
    count: int
    drives: bool

    @classmethod
    def of(cls, groups: Groups) -> TrainingDriver:
        first = groups.model.rank() == 0 and groups.context.rank() == 0
        return cls(groups.data.rank(), groups.data.size(), first)


class Feeding(Protocol):
    """What gives those who answer their weights."""

    @property
    def starved(self) -> bool:
        """See LastingLoop.starved."""
        ...

    def renew(self) -> None:
        """Give them the newest. Collective over all ranks."""


class AgentThread(LastingLoop):
    """Agents in a thread of their own, which goes on while the rank trains; others answer."""

    spare_s = 0.0

    def __init__(self, place: DriverPlace, refit: Feeding) -> None:
        self.place = place
        self._refit = refit
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="agents", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def do(self, work: Callable[[asyncio.AbstractEventLoop], Result]) -> Result:
        """See LastingLoop.do."""

        async def call() -> Result:
            return work(self._loop)

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result()

    def advance(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """See LastingLoop.advance: they get on all the time."""
        if self.place.drives:
            asyncio.run_coroutine_threadsafe(work(), self._loop).result()

    def pause(self) -> None:
        """See LastingLoop.pause: nothing is in the way of training."""

    @property
    def starved(self) -> bool:
        """See LastingLoop.starved."""
        return self._refit.starved

    def feed(self) -> None:
        """See LastingLoop.feed."""
        self._refit.renew()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)
