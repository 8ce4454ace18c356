"""The engine in a thread of its own, so that HTTP is served while it computes.

    HTTP loop:       subscription = thread.submit(request, streamed, news)    await news.wait()    subscription.unread()
    engine's thread: what was asked meanwhile, one step, what the step brought; and again

What a step brings crosses over at once: one wake-up of the HTTP loop takes all there is by then, however many requests
it is about. A request that is not streamed brings something once only, when it is answered. The engine never waits for
a reader: what one leaves unread is kept up to a limit, beyond which its request is cancelled.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar, cast

from megatron_rl.inference.api import Completion, Delta, EngineLoad, GenerationRequest

T = TypeVar("T")

MOST_UNREAD = 4096
"""Deltas that wait for a reader: about a token each."""
STOP_S = 30.0
"""That the thread has to end once it was asked to: a step of the engine is not interrupted."""

_News = list[tuple["Subscription", Sequence[Delta] | Exception]]


class ServedEngine(Protocol):
    """What the server asks of an engine. See `inference.engine.Engine`."""

    @property
    def busy(self) -> bool: ...

    @property
    def load(self) -> EngineLoad: ...

    @property
    def answered(self) -> Sequence[str]: ...

    def submit(self, request: GenerationRequest, *, streamed: bool = False) -> str: ...

    def cancel(self, request_id: str) -> None: ...

    def step(self) -> None: ...

    def take(self, request_id: str) -> list[Completion] | None: ...

    def take_deltas(self) -> list[tuple[str, Delta]]: ...


class EngineGone(RuntimeError):
    """The engine, or the server in front of it, has stopped; the message says why."""


class ReaderTooSlow(RuntimeError):
    """More has been said than a reader may leave unread."""


class Subscription:
    """What the engine says about one request, read in the HTTP loop. Whoever has one closes it."""

    def __init__(self, thread: EngineThread, request: GenerationRequest, streamed: bool, news: asyncio.Event) -> None:
        self.request, self.streamed = request, streamed
        self._thread = thread
        self._news = news
        self._unread: list[Delta] = []
        self._unfinished = request.num_samples
        self._error: Exception | None = None
        self._closed = False

    def take(self, news: Sequence[Delta] | Exception) -> None:
        """In the HTTP loop; an exception is the end."""
        if self._closed or self._error:
            return
        if isinstance(news, Exception):
            self._error = news
        elif len(self._unread) + len(news) <= MOST_UNREAD:
            self._unread += news
            self._unfinished -= sum(delta.finish_reason is not None for delta in news)
        else:
            self._error = ReaderTooSlow("the reader was too slow")
            self._unread.clear()
            self._thread.forget(self)
        self._news.set()

    def unread(self) -> list[Delta]:
        """All that was said since this was asked before. Raises what the engine did, when there is no more."""
        unread, self._unread = self._unread, []
        if self._error is not None:
            if not unread:
                raise self._error
            self._news.set()  # the error is still to be read
        return unread

    @property
    def answered(self) -> bool:
        """Whether all was said and read."""
        return self._unfinished == 0 and not self._unread

    def close(self) -> None:
        """Cancel the request, unless it is answered."""
        if not self._closed:
            self._closed = True
            self._thread.forget(self)


class EngineThread:
    """Runs an engine. All but what says so is for the HTTP loop, in which `start` is called."""

    def __init__(self, engine: ServedEngine, failed: Callable[[Exception], None] | None = None) -> None:
        """failed: called where a step has failed, in the engine's thread, before anybody is told."""
        self._engine = engine
        self._failed = failed
        self._http = cast(asyncio.AbstractEventLoop, None)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._open: set[Subscription] = set()
        self._stopped: str | None = None
        self._submitted = 0  # samples
        self._begun = 0  # of these, by the engine
        self._counted = 0  # of these, in its load
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._asked: dict[str, Subscription] = {}  # for the engine's thread
        self._outbox: deque[_News] = deque()
        self._told = False  # whether the HTTP loop knows that there is something in the outbox
        self.load = engine.load
        """Of the engine, as it began its last step or ended it."""

    def start(self) -> None:
        self._http = asyncio.get_running_loop()
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self._stopped is None

    @property
    def waiting(self) -> int:
        """Samples that wait for the engine."""
        return self._submitted - self._counted + self.load.waiting

    def submit(self, request: GenerationRequest, streamed: bool, news: asyncio.Event) -> Subscription:
        """Have the engine answer. Raises EngineGone.

        news: set whenever the subscription has something to read.
        """
        if not self.alive:
            raise EngineGone(self._stopped or "the engine has stopped")
        subscription = Subscription(self, request, streamed, news)
        self._open.add(subscription)
        self._submitted += request.num_samples
        self._calls.put(partial(self._begin, subscription))
        return subscription

    def call(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """What `work` returns, or raises, in the engine's thread between two steps. Raises EngineGone."""
        if not self.alive:
            raise EngineGone(self._stopped or "the engine has stopped")
        done: Future[T] = Future()
        self._calls.put(partial(_do, work, done))
        return asyncio.wrap_future(done)

    def forget(self, subscription: Subscription) -> None:
        """See Subscription.close."""
        if subscription in self._open:
            self._open.discard(subscription)
            self._calls.put(partial(self._cancel, subscription.request.id))

    def stop(self, why: str) -> None:
        """Tell all who wait that there will be no answer, and have the thread end."""
        if self._stopped is not None:
            return
        self._stopped = why
        for subscription in list(self._open):
            subscription.take(EngineGone(why))
            self.forget(subscription)
        self._calls.put(None)

    @property
    def computes(self) -> bool:
        """Whether the thread is still there, in the middle of a step if it was asked to stop."""
        return self._thread.is_alive()

    def join(self) -> bool:
        """Wait for the end of the thread after `stop`, in any other thread; whether it has come."""
        self._thread.join(STOP_S)
        return not self._thread.is_alive()

    def _hear(self) -> None:
        self._told = False  # first: what is said from here on may or may not be heard below
        while self._outbox:
            for subscription, news in self._outbox.popleft():
                subscription.take(news)

    # In the engine's thread

    def _run(self) -> None:
        try:
            while self._follow_calls():
                failed = self._step()
                self._tell(failed or self._news())
        finally:  # whatever has ended it, nobody waits for it any more
            with suppress(RuntimeError):  # the HTTP loop may be closed
                self._http.call_soon_threadsafe(self.stop, "the engine has stopped")

    def _follow_calls(self) -> bool:
        """Do what was asked meanwhile; wait for it where there is nothing else to do. Returns whether to go on."""
        wait = not self._engine.busy
        with suppress(Empty):
            while True:
                call = self._calls.get(block=wait)
                if call is None:
                    return False
                call()
                wait = False
        self.load = self._engine.load
        self._counted = self._begun
        return True

    def _begin(self, subscription: Subscription) -> None:
        request = subscription.request
        try:
            self._engine.submit(request, streamed=subscription.streamed)
        except Exception as error:  # noqa: BLE001 - raised where it is read
            self._tell([(subscription, error)])
        else:
            self._asked[request.id] = subscription
        self._begun += request.num_samples

    def _cancel(self, request_id: str) -> None:
        self._engine.cancel(request_id)
        self._asked.pop(request_id, None)

    def _step(self) -> _News:
        """Returns who must be told that it has failed."""
        try:
            if self._engine.busy:
                self._engine.step()
        except Exception as error:  # noqa: BLE001 - it has cost all requests, and each raises it where it is read
            if self._failed:
                self._failed(error)
            asked, self._asked = self._asked, {}
            return [(subscription, error) for subscription in asked.values()]
        return []

    def _news(self) -> _News:
        """What the step has brought; nothing to a request that a failed one has cost."""
        deltas = [(name, [delta]) for name, delta in self._engine.take_deltas()]
        answers = [(name, _deltas(self._engine.take(name) or ())) for name in self._engine.answered]
        return [(self._asked[name], news) for name, news in deltas + answers if name in self._asked]

    def _tell(self, news: _News) -> None:
        self.load = self._engine.load
        if not news:
            return
        self._outbox.append(news)
        if not self._told:
            self._told = True
            self._http.call_soon_threadsafe(self._hear)


def _do(work: Callable[[], T], done: Future[T]) -> None:
    try:
        done.set_result(work())
    except Exception as error:  # noqa: BLE001 - raised where it is awaited
        done.set_exception(error)


def _deltas(answers: Sequence[Completion]) -> list[Delta]:
    """One for each, with all of it."""
    return [
        Delta(sample, one.tokens, one.logprobs, one.versions, one.top_logprobs, one.finish_reason, one.stop, one.prompt)
        for sample, one in enumerate(answers)
    ]
