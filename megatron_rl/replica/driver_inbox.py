"""What each driver has asked, and the news that it has not seen yet."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megatron_rl.inference.api import Delta, GenerationRequest
from megatron_rl.inference.replicas.wire import OTHER_VERSION, REFUSED, Refusal, kind_of
from megatron_rl.server.engine_thread import EngineGone, EngineThread, Subscription

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Driver:
    asked: dict[str, Subscription] = field(default_factory=dict)
    """Requests that are not answered."""
    unseen: list[tuple[int, tuple[str, Delta] | Refusal]] = field(default_factory=list)
    """News, numbered from 1."""
    last: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, news: tuple[str, Delta] | Refusal) -> None:
        self.last += 1
        self.unseen.append((self.last, news))
        self.news.set()


class DriverInbox:
    """Between HTTP and the engine's thread. All of it is for the HTTP loop."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread
        self._drivers: defaultdict[int, _Driver] = defaultdict(_Driver)
        self._news = asyncio.Event()
        self._closed = False

    def forget(self, driver: int) -> None:
        """Begin anew with a driver: cancel what it asked, and drop what it has not seen."""
        if (before := self._drivers.pop(driver, None)) is not None:
            for subscription in before.asked.values():
                subscription.close()
            before.news.set()

    def ask(
        self, driver: int, requests: Iterable[GenerationRequest], cancelled: Iterable[str], version: int | None
    ) -> None:
        """Have requests answered, and others not.

        version: of the weights, where they are older than those that the requests are for; None: they are not.

        Raises EngineGone.
        """
        its = self._drivers[driver]
        for request in requests:
            if version is not None:
                message = f"the weights are of version {version}"
                its.tell(Refusal(request.id, OTHER_VERSION, message))
            elif request.id not in its.asked:  # one that comes twice is one
                its.asked[request.id] = self._thread.submit(request, True, self._news)
        for request_id in cancelled:
            if (subscription := its.asked.pop(request_id, None)) is not None:
                subscription.close()

    async def news(
        self, driver: int, seen: int, wait_s: float
    ) -> tuple[int, Sequence[tuple[str, Delta]], Sequence[Refusal]]:
        """What a driver has not seen: number of the newest, tokens, refusals; nothing where nothing comes in time."""
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
        """Have all drivers hear at once how things are."""
        for its in self._drivers.values():
            its.news.set()

    def close(self) -> None:
        """Nobody waits for news any more."""
        self._closed = True
        self.wake()

    async def deliver(self) -> None:
        """Take over what the engine says, for ever."""
        while True:
            await self._news.wait()
            self._news.clear()
            for its in self._drivers.values():
                for request_id, subscription in list(its.asked.items()):
                    self._read(its, request_id, subscription)

    def _read(self, its: _Driver, request_id: str, subscription: Subscription) -> None:
        try:
            for delta in subscription.unread():
                its.tell((request_id, delta))
        except REFUSED as error:
            its.tell(Refusal(request_id, kind_of(error), str(error)))
            del its.asked[request_id]
        except EngineGone:
            del its.asked[request_id]  # as the replica leaves: another one is asked
        except Exception as error:  # noqa: BLE001 - the engine's end, and so the replica's: another one is asked
            logger.error("request %s: %r", request_id, error)
            del its.asked[request_id]
        else:
            if subscription.answered:
                del its.asked[request_id]
                subscription.close()
