"""Open requests of each driver, and the news that it has not seen yet."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megatron_rl.generate.engine.engine_thread import EngineGone
from megatron_rl.generate.engine.interface import Delta, GenerationRequest
from megatron_rl.generate.replicas.wire import OTHER_VERSION, REFUSED, Refusal, kind_of

logger = logging.getLogger(__name__)


class OpenRequest(Protocol):
    @property
    def answered(self) -> bool: ...

    def unread(self) -> list[Delta]:
        """Return all new results since the last call. Raises the engine's error when there are no more."""
        ...

    def close(self) -> None:
        """Cancel the request, unless it is answered."""
        ...


@dataclass(slots=True)
class _Driver:
    asked: dict[str, OpenRequest] = field(default_factory=dict)
    unseen: list[tuple[int, tuple[str, Delta] | Refusal]] = field(default_factory=list)
    """News with their numbers, which start at 1."""
    last: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, news: tuple[str, Delta] | Refusal) -> None:
        self.last += 1
        self.unseen.append((self.last, news))
        self.news.set()


class DriverInbox:
    """Passes requests of drivers to the engine, and keeps its news for them. All methods belong to the HTTP loop."""

    def __init__(self, submit: Callable[[GenerationRequest, asyncio.Event], OpenRequest]) -> None:
        self._submit = submit
        self._drivers: defaultdict[int, _Driver] = defaultdict(_Driver)
        self._news = asyncio.Event()
        self._closed = False
        self.sampled = 0
        """Tokens of the engine's results so far."""

    def forget(self, driver: int) -> None:
        """Reset a driver: cancel its requests, and drop the news that it has not seen."""
        if (before := self._drivers.pop(driver, None)) is not None:
            for asked in before.asked.values():
                asked.close()
            before.news.set()

    def ask(
        self, driver: int, requests: Iterable[GenerationRequest], cancelled: Iterable[str], version: int | None
    ) -> None:
        """Submit requests to the engine, and cancel others.

        version: version of the weights, if it is too old for the requests; else None.

        Raises EngineGone.
        """
        its = self._drivers[driver]
        for request in requests:
            if version is not None:
                its.add(Refusal(request.id, OTHER_VERSION, f"the weights are of version {version}"))
            elif request.id not in its.asked:  # a request may arrive twice
                try:
                    its.asked[request.id] = self._submit(request, self._news)
                except REFUSED as error:
                    its.add(Refusal(request.id, kind_of(error), str(error)))
        for request_id in cancelled:
            if (asked := its.asked.pop(request_id, None)) is not None:
                asked.close()

    async def news(
        self, driver: int, seen: int, wait_s: float
    ) -> tuple[int, Sequence[tuple[str, Delta]], Sequence[Refusal]]:
        """Return the news that a driver has not seen, after `wait_s` seconds perhaps none: number of the newest,
        tokens, refusals."""
        its = self._drivers[driver]
        its.unseen = [(number, one) for number, one in its.unseen if number > seen]
        if not its.unseen and not self._closed:
            its.news.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await its.news.wait()
            except TimeoutError:
                pass
        pieces = [one for _, one in its.unseen if not isinstance(one, Refusal)]
        return its.last, pieces, [one for _, one in its.unseen if isinstance(one, Refusal)]

    def wake(self) -> None:
        """Make all waits for news return, so that drivers learn the replica's state."""
        for its in self._drivers.values():
            its.news.set()

    def close(self) -> None:
        self._closed = True
        self.wake()

    async def deliver(self) -> None:
        """Pass on the engine's results, forever."""
        while True:
            await self._news.wait()
            self._news.clear()
            for its in self._drivers.values():
                for request_id, asked in list(its.asked.items()):
                    self._read(its, request_id, asked)

    def _read(self, its: _Driver, request_id: str, asked: OpenRequest) -> None:
        try:
            for delta in asked.unread():
                self.sampled += len(delta.tokens)
                its.add((request_id, delta))
        except REFUSED as error:
            its.add(Refusal(request_id, kind_of(error), str(error)))
            del its.asked[request_id]
        except EngineGone:
            del its.asked[request_id]  # the replica is leaving, so another one will be asked
        except Exception as error:  # noqa: BLE001 - it ends the engine and the replica, so another one will be asked
            logger.error("request %s: %r", request_id, error)
            del its.asked[request_id]
        else:
            if asked.answered:
                del its.asked[request_id]
                asked.close()
