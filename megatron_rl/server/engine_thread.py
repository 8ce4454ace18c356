"""The engine in a thread of its own, so that HTTP is served while it computes.

    HTTP loop:     subscription = thread.submit(request, news)      await news.wait()      subscription.unread()
    engine loop:   async for delta in engine.stream(request): one task a request

What the engine says crosses over in batches: one wake-up of the HTTP loop takes all there is by then, however many
requests it is about. The engine never waits for a reader: what one leaves unread is kept up to a limit, beyond which
its request is cancelled.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from contextlib import aclosing
from typing import Protocol, cast

from megatron_rl.inference.api import Delta, EngineLoad, GenerationRequest, StreamingInference

MOST_UNREAD = 4096
"""Deltas that wait for a reader: about a token each."""
STOP_S = 30.0
"""That the thread has to end once it was asked to: a step of the engine is not interrupted."""


class ServedEngine(StreamingInference, Protocol):
    """What the server asks of an engine."""

    @property
    def load(self) -> EngineLoad: ...


class EngineGone(RuntimeError):
    """The engine, or the server in front of it, has stopped; the message says why."""


class ReaderTooSlow(RuntimeError):
    """More has been said than a reader may leave unread."""


class Subscription:
    """What the engine says about one request, read in the HTTP loop. Whoever has one closes it."""

    def __init__(self, thread: EngineThread, request: GenerationRequest, news: asyncio.Event) -> None:
        self.request = request
        self._thread = thread
        self._unread: list[Delta] = []
        self._news = news
        self._end: Exception | None = None
        self._closed = False
        self.heard = False
        """Whether the engine has said anything."""
        self.task: asyncio.Task[None] | None = None
        """In the engine's loop."""

    def take(self, news: Delta | Exception) -> None:
        """In the HTTP loop; an exception is the end."""
        if self._closed or self._end:
            return
        if isinstance(news, Exception):
            self._end = news
        elif len(self._unread) < MOST_UNREAD:
            self._unread.append(news)
        else:
            self._end = ReaderTooSlow("the reader was too slow")
            self._unread.clear()
            self._thread.cancel(self)
        self._news.set()

    def unread(self) -> list[Delta]:
        """All that was said since this was asked before. Raises what the engine did, when there is no more."""
        unread, self._unread = self._unread, []
        if self._end is not None and not self.answered:
            if not unread:
                raise self._end
            self._news.set()  # the error is still to be read
        return unread

    @property
    def answered(self) -> bool:
        """Whether all was said and read."""
        return isinstance(self._end, _Answered) and not self._unread

    def close(self) -> None:
        """Cancel the request, unless it is answered."""
        if not self._closed:
            self._closed = True
            self._thread.cancel(self)


class _Answered(Exception):
    """The request is answered."""


class EngineThread:
    """Runs an engine. All but what says so is for the HTTP loop, in which `start` is called."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine
        self._here = cast(asyncio.AbstractEventLoop, None)
        self._there = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._open: set[Subscription] = set()
        self._outbox: deque[tuple[Subscription, Delta | Exception]] = deque()
        self._told = False  # whether the HTTP loop knows that there is something in the outbox
        self._stopped: str | None = None
        self.load = engine.load
        """Of the engine, as of the last time that it said anything."""
        self.unheard = 0
        """Samples of the requests that the engine has said nothing about yet: they wait, or their prompt is read."""

    def start(self) -> None:
        self._here = asyncio.get_running_loop()
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self._stopped is None

    def submit(self, request: GenerationRequest, news: asyncio.Event) -> Subscription:
        """Have the engine answer. Raises EngineGone.

        news: set whenever the subscription has something to read.
        """
        if not self.alive:
            raise EngineGone(self._stopped or "the engine has stopped")
        subscription = Subscription(self, request, news)
        self._open.add(subscription)
        self.unheard += request.num_samples
        self._there.call_soon_threadsafe(self._begin, subscription)
        return subscription

    def cancel(self, subscription: Subscription) -> None:
        """See Subscription.close."""
        if subscription in self._open:
            self._close(subscription)
            if self._thread.is_alive():
                self._there.call_soon_threadsafe(self._cancel, subscription)

    def stop(self, why: str) -> None:
        """Tell all who wait that there will be no answer, and have the thread end."""
        if self._stopped is not None:
            return
        self._stopped = why
        for subscription in list(self._open):
            subscription.take(EngineGone(why))
            self.cancel(subscription)
        if self._thread.is_alive():
            self._there.call_soon_threadsafe(self._there.stop)

    def join(self) -> bool:
        """Wait for the end of the thread after `stop`, in any other thread; whether it has come."""
        self._thread.join(STOP_S)
        return not self._thread.is_alive()

    def _hear(self) -> None:
        self._told = False  # first: what is said from here on may or may not be heard below
        while self._outbox:
            subscription, news = self._outbox.popleft()
            if isinstance(news, Exception):
                self._close(subscription)
            elif not subscription.heard:
                subscription.heard = True
                self.unheard -= subscription.request.num_samples
            subscription.take(news)

    def _close(self, subscription: Subscription) -> None:
        if subscription in self._open:
            self._open.discard(subscription)
            if not subscription.heard:
                subscription.heard = True
                self.unheard -= subscription.request.num_samples

    # In the engine's thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._there)
        try:
            self._there.run_forever()
            left = asyncio.all_tasks(self._there)
            for task in left:
                task.cancel()
            self._there.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        finally:
            self._there.close()

    def _begin(self, subscription: Subscription) -> None:
        subscription.task = self._there.create_task(self._answer(subscription))

    def _cancel(self, subscription: Subscription) -> None:
        if subscription.task is not None:
            subscription.task.cancel()

    async def _answer(self, subscription: Subscription) -> None:
        end: Exception = _Answered()
        try:
            deltas = self._engine.stream(subscription.request)
            async with aclosing(deltas):  # type: ignore[type-var]  # an asynchronous generator
                async for delta in deltas:
                    self._say(subscription, delta)
        except Exception as error:  # noqa: BLE001 - raised where it is read
            end = error
        finally:
            self._say(subscription, end)

    def _say(self, subscription: Subscription, news: Delta | Exception) -> None:
        self._outbox.append((subscription, news))
        if not self._told or isinstance(news, Exception):
            self.load = self._engine.load
        if not self._told:
            self._told = True
            self._here.call_soon_threadsafe(self._hear)
