"""The engine in its own thread, so that HTTP is served while it computes.

    HTTP loop:       subscription = thread.submit(request, streamed, news)    await news.wait()    subscription.unread()
    engine's thread: run the queued calls, compute one step, pass on its results; and again

One wake-up of the HTTP loop passes on all results that are available, for all requests. A request that is not streamed
has a single result, its answer. The engine never waits for a reader: results are kept until they are read.
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
from typing import TypeVar, cast

from megatron_rl.generate.engine.interface import Completion, Delta, GenerationRequest, SteppedEngine

T = TypeVar("T")

STOP_S = 30.0
"""Limit, in seconds, for the thread to end: a step of the engine cannot be interrupted."""

_News = list[tuple["Subscription", Sequence[Delta] | Exception]]


class EngineGone(RuntimeError):
    """The engine, or the server around it, has stopped; the message says why."""


class Subscription:
    """Results of one request, read in the HTTP loop. Its owner must close it."""

    def __init__(self, thread: EngineThread, request: GenerationRequest, streamed: bool, news: asyncio.Event) -> None:
        self.request, self.streamed = request, streamed
        self._thread = thread
        self._news = news
        self._unread: list[Delta] = []
        self._unfinished = request.num_samples
        self._error: Exception | None = None
        self._closed = False

    def take(self, news: Sequence[Delta] | Exception) -> None:
        """Add results, in the HTTP loop; an exception is the last one."""
        if self._closed or self._error:
            return
        if isinstance(news, Exception):
            self._error = news
        else:
            self._unread += news
            self._unfinished -= sum(delta.finish_reason is not None for delta in news)
        self._news.set()

    def unread(self) -> list[Delta]:
        """Return all new results since the last call. Raises the engine's error when there are no more."""
        unread, self._unread = self._unread, []
        if self._error is not None:
            if not unread:
                raise self._error
            self._news.set()  # the next call must raise the error
        return unread

    @property
    def answered(self) -> bool:
        return self._unfinished == 0 and not self._unread

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._thread.forget(self)


class EngineThread:
    """Runs an engine. Methods are for the HTTP loop, in which `start` must be called, unless they say otherwise."""

    def __init__(self, engine: SteppedEngine, failed: Callable[[Exception], None] | None = None) -> None:
        """failed: called in the engine's thread with the error of a step, before any caller gets it."""
        self._engine = engine
        self._failed = failed
        self._http = cast(asyncio.AbstractEventLoop, None)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._open: set[Subscription] = set()
        self._stopped: str | None = None
        self._submitted = 0  # samples
        self._begun = 0  # number of these that the engine has got
        self._counted = 0  # number of these that `load` includes
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._asked: dict[str, Subscription] = {}  # only for the engine's thread
        self._outbox: deque[_News] = deque()
        self._notified = False  # whether the HTTP loop will read the outbox
        self.load = engine.load

    def start(self) -> None:
        self._http = asyncio.get_running_loop()
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self._stopped is None

    @property
    def waiting(self) -> int:
        # `load` is as old as the last step, and lacks the samples that were submitted since. If it counted alone, a
        # thousand requests that arrive during one step would all find an idle engine. `_counted` is the number of
        # samples that the engine had got when `load` was read, so the difference is those that `load` lacks.
        return self._submitted - self._counted + self.load.waiting

    def submit(self, request: GenerationRequest, streamed: bool, news: asyncio.Event) -> Subscription:
        """Queue a request. Raises EngineGone.

        news: set whenever the subscription has new results.
        """
        if not self.alive:
            raise EngineGone(self._stopped or "the engine has stopped")
        subscription = Subscription(self, request, streamed, news)
        self._open.add(subscription)
        self._submitted += request.num_samples
        self._calls.put(partial(self._begin, subscription))
        return subscription

    def call(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run `work` in the engine's thread, between two steps, and return its result. Raises EngineGone."""
        if not self.alive:
            raise EngineGone(self._stopped or "the engine has stopped")
        done: Future[T] = Future()
        self._calls.put(partial(_do, work, done))
        return asyncio.wrap_future(done)

    def forget(self, subscription: Subscription) -> None:
        if subscription in self._open:
            self._open.discard(subscription)
            self._calls.put(partial(self._cancel, subscription.request.id))

    def stop(self, why: str) -> None:
        if self._stopped is not None:
            return
        self._stopped = why
        for subscription in list(self._open):
            subscription.take(EngineGone(why))
            self.forget(subscription)
        self._calls.put(None)

    @property
    def computes(self) -> bool:
        """Whether the thread still runs: after `stop`, it is in the middle of a step."""
        return self._thread.is_alive()

    def join(self) -> bool:
        self._thread.join(STOP_S)
        return not self._thread.is_alive()

    def _read_outbox(self) -> None:
        self._notified = False  # first, so that results which come during the loop below cause another call
        while self._outbox:
            for subscription, news in self._outbox.popleft():
                subscription.take(news)

    # In the engine's thread

    def _run(self) -> None:
        try:
            while self._follow_calls():
                failed = self._step()
                self._publish(failed or self._news())
        finally:  # whatever the reason, no request will be answered any more
            with suppress(RuntimeError):  # the HTTP loop may be closed
                self._http.call_soon_threadsafe(self.stop, "the engine has stopped")

    def _follow_calls(self) -> bool:
        """Run the queued calls; wait for one if the engine is idle. Returns whether to continue."""
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
            self._publish([(subscription, error)])
        else:
            self._asked[request.id] = subscription
        self._begun += request.num_samples

    def _cancel(self, request_id: str) -> None:
        self._engine.cancel(request_id)
        self._asked.pop(request_id, None)

    def _step(self) -> _News:
        """Compute a step. Returns its error for every open subscription if it fails."""
        try:
            if self._engine.busy:
                self._engine.step()
        except Exception as error:  # noqa: BLE001 - it fails every request, and each raises it where it is read
            if self._failed:
                self._failed(error)
            asked, self._asked = self._asked, {}
            return [(subscription, error) for subscription in asked.values()]
        return []

    def _news(self) -> _News:
        """Return the results of the step, except of requests that a failed step has ended."""
        deltas = [(name, [delta]) for name, delta in self._engine.take_deltas()]
        answers = [(name, as_deltas(self._engine.take(name) or ())) for name in self._engine.answered]
        return [(self._asked[name], news) for name, news in deltas + answers if name in self._asked]

    def _publish(self, news: _News) -> None:
        self.load = self._engine.load
        if not news:
            return
        self._outbox.append(news)
        if not self._notified:
            self._notified = True
            self._http.call_soon_threadsafe(self._read_outbox)


def _do(work: Callable[[], T], done: Future[T]) -> None:
    if not done.set_running_or_notify_cancel():
        return  # nobody waits for it any more
    try:
        done.set_result(work())
    except Exception as error:  # noqa: BLE001 - raised where it is awaited
        done.set_exception(error)


def as_deltas(answers: Sequence[Completion]) -> list[Delta]:
    return [
        Delta(
            sample,
            one.tokens,
            one.logprobs,
            one.versions,
            one.top_logprobs,
            one.finish_reason,
            one.stop,
            one.prompt,
            one.choices,
        )
        for sample, one in enumerate(answers)
    ]
