"""All inference replicas as the one engine of a rollout driver.

    agents' loop                            the pool's thread
    await pool.generate(request)    ->      the replica with the least to do, or the one that knows how it begins
                                            tokens as they come; where it dies, another one goes on
    pool.announce()                 ->      what is begun from now on waits for the next version ...
    pool.policy_version = 7         ->      ... and only replicas that have them are asked anything new

The thread is there while the rank trains too: a replica that the first rank has not asked anything for a while takes
the run for dead.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from megatron_rl.contract.paths import Attempt
from megatron_rl.inference.api import Completion, GenerationRequest, PartialAnswer, Unsupported
from megatron_rl.inference.replicas.choice import Pace, choose, too_slow
from megatron_rl.inference.replicas.link import Patience, ReplicaGone, ReplicaLink
from megatron_rl.inference.replicas.links import ReplicaLinks
from megatron_rl.inference.replicas.roster import Start
from megatron_rl.inference.replicas.unanswered import Unanswered
from megatron_rl.inference.replicas.wire import OTHER_VERSION, News, decode_about

logger = logging.getLogger(__name__)

STOP_S = 10.0
"""That the thread has to end."""
END_S = 3.0
"""That replicas have to hear that they are to end."""

Result = TypeVar("Result")


class NoReplica(RuntimeError):
    """No replica could be asked for too long."""


class _Work:
    """A request on its way."""

    def __init__(self, request: GenerationRequest) -> None:
        self.unanswered = Unanswered(request)
        self.answer: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        self.link: ReplicaLink | None = None
        """That was asked."""
        self.counted = 0
        """Of its tokens, in what the link has outstanding."""


class ReplicaPool:
    """Implements `ResumableInference` over the replicas of an attempt. A rank that follows a driver has one that was
    never started."""

    def __init__(
        self,
        attempt: Attempt,
        digest: str,
        token: str,
        driver: int,
        *,
        goes_on: bool,
        limit_s: float,
        patience: Patience | None = None,
    ) -> None:
        """
        digest: see `wire.digest_of`.
        token: the run's.
        driver: number of this one; the first one keeps the replicas alive.
        goes_on: whether an answer whose replica is lost goes on from its tokens, or is sampled again: see
            `resume.partial`.
        limit_s: that it may take until any replica can be asked, or one that is asked has a token.
        """
        self.busy_s = 0.0
        """See `ResumableInference.busy_s`: seconds for which replicas computed, or were waited for."""
        self.repeated = 0
        """Requests that were asked again because their replica was lost or slow."""
        self.given_up: str | None = None
        """Why there will be no replica any more; None: there may be."""
        self._goes_on, self._limit_s = goes_on, limit_s
        self._patience = patience or Patience()
        self._policy_version = -1
        self._starved = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="replicas", daemon=True)
        # For the thread alone, from here on
        self._links = ReplicaLinks(
            attempt, digest, token, driver, self._patience, self._spawn, self._heard, self._ask_elsewhere
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._work: dict[str, _Work] = {}
        self._homes: dict[int, Start] = {}  # ordinal: where its prompt is
        self._newest_ordinal = -1  # that anything was asked about
        self._held_after: int | None = None  # while a version is on its way: the newest ordinal of before
        self._since = time.monotonic()  # until when `busy_s` counts
        self._nobody_since: float | None = None
        self._said_at = 0.0
        self._failure: BaseException | None = None

    def start(self) -> None:
        """Look for replicas, and stay in touch with them."""
        self._thread.start()

    def announce(self) -> None:
        """Weights of a further version are on their way: what is asked from now on waits until they are
        `policy_version`. What is about a prompt that was asked about before, or an earlier one, goes on by those that
        there are: prompts are begun in ascending order."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._hold)

    @property
    def policy_version(self) -> int:
        """Of the weights that its answers are sampled by."""
        return self._policy_version

    @policy_version.setter
    def policy_version(self, policy_version: int) -> None:
        self._policy_version = policy_version
        self._starved = False
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._begin_version)

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """See `InferenceInterface.generate`. A caller that is cancelled leaves nothing behind.

        Raises NoReplica where none could be asked for too long.
        """
        if request.top_logprobs:
            raise Unsupported("top_logprobs: replicas of a run do not tell them")
        return await asyncio.wrap_future(self._in_thread(self._generate(request)))

    def partial_answers(self) -> list[PartialAnswer]:
        """See `ResumableInference.partial_answers`: as much as the replicas have told of."""
        return self._in_thread(self._partial_answers()).result()

    @property
    def starved(self) -> bool:
        """Whether requests wait for weights: replicas are there, and none of them has those of this version, because
        all that had are lost."""
        return self._starved

    def starts(self) -> dict[Start, int]:
        """The replicas that answer now, and how many ranks each has."""
        return self._in_thread(self._starts()).result()

    def metrics(self) -> dict[str, float]:
        """What happened since they were asked for before: see metrics.names."""
        return self._in_thread(self._metrics()).result()

    def call(self, start: Start, path: str, body: dict[str, Any], timeout_s: float = 0.0) -> Future[dict[str, Any]]:
        """Have a replica do something, see `wire`. The future raises ReplicaGone."""
        return self._in_thread(self._call(start, path, body, timeout_s))

    def close(self, *, end: bool = False) -> None:
        """End the thread. end: tell all replicas that the run needs them no more."""
        if not self._thread.is_alive():
            return
        with suppress(TimeoutError):
            self._in_thread(self._close(end)).result(STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)

    def _in_thread(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # In the thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._spawn(self._look_after())
        self._loop.run_forever()
        self._loop.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[None]) -> None:
        """Nobody awaits these: what was not foreseen in one of them is raised by whoever waits for an answer."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the replicas are looked after no more: %r", error)
            self._failure = error
            for work in self._work.values():
                if not work.answer.done():
                    work.answer.set_exception(error)

    async def _close(self, end: bool) -> None:
        if end:
            await self._links.end(END_S)
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _starts(self) -> dict[Start, int]:
        return {start: link.about.ranks for start, link in self._links.reached.items() if link.about is not None}

    async def _metrics(self) -> dict[str, float]:
        repeated, self.repeated = self.repeated, 0
        ready = self._links.ready(self._policy_version).values()
        found: dict[str, float] = {
            "system/replicas": len(ready),
            "system/slow_replicas": sum(link.slow for link in ready),
            "system/repeated_requests": repeated,
        }
        if (share := self._links.busy_share()) is not None:
            found["system/replica_busy_mean"] = share
        return found

    async def _partial_answers(self) -> list[PartialAnswer]:
        return [part for work in self._work.values() for part in work.unanswered.partial_answers()]

    async def _call(self, start: Start, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        link = self._links.get(start)
        if link is None:
            raise ReplicaGone(f"replica {start[0]} (start {start[1]}) is gone")
        said = await link.post(path, body, timeout_s)
        link.about = decode_about(said)  # after a swap: the next request need not wait for news of one and ask another
        return said

    async def _generate(self, request: GenerationRequest) -> list[Completion]:
        if self._failure is not None:
            raise self._failure
        if not self._work:
            self._since = time.monotonic()
        work = self._work[request.id] = _Work(request)
        if request.ordinal is not None:
            self._newest_ordinal = max(self._newest_ordinal, request.ordinal)
        self._place(work)
        try:
            return await work.answer
        finally:
            del self._work[request.id]
            if work.link is not None:
                if not work.unanswered.answered:
                    work.link.cancel(request.id)
                self._take_away(work)

    # Which replica is asked

    def _place(self, work: _Work) -> None:
        """Ask a replica, if there is any to ask; else the request waits."""
        request = work.unanswered.request
        if self._held_after is not None and (request.ordinal is None or request.ordinal > self._held_after):
            return
        ready = self._links.ready(self._policy_version)
        fast = {start: link for start, link in ready.items() if not link.slow}
        candidates = {start: link.outstanding for start, link in (fast or ready).items()}
        start = choose(candidates, None if request.ordinal is None else self._homes.get(request.ordinal))
        if start is None:
            if self._nobody_since is None:
                self._nobody_since = self._said_at = time.monotonic()
            return
        self._nobody_since = None
        if request.ordinal is not None:
            self._homes[request.ordinal] = start
        work.link = ready[start]
        work.link.ask(request, self._policy_version)
        self._count(work)

    def _place_all(self) -> None:
        for work in self._work.values():
            if work.link is None and not work.answer.done():
                self._place(work)

    def _count(self, work: _Work) -> None:
        assert work.link is not None
        outstanding = work.unanswered.outstanding
        work.link.outstanding += outstanding - work.counted
        work.counted = outstanding

    def _take_away(self, work: _Work) -> None:
        assert work.link is not None
        work.link.outstanding -= work.counted
        work.link, work.counted = None, 0

    def _ask_elsewhere(self, link: ReplicaLink) -> None:
        """Have others answer what a replica was asked."""
        moved = [work for work in self._work.values() if work.link is link and not work.answer.done()]
        for work in moved:
            link.cancel(work.unanswered.request.id)
            self._take_away(work)
            work.unanswered.begin_again(with_parts=self._goes_on)
        self.repeated += len(moved)
        if moved:
            logger.warning("%d requests of %s are asked elsewhere", len(moved), link.name)
        self._place_all()

    def _hold(self) -> None:
        self._held_after = self._newest_ordinal

    def _begin_version(self) -> None:
        self._held_after = None
        self._homes.clear()
        for link in self._links.reached.values():
            link.pace, link.slow = Pace(), False
        self._place_all()

    # What replicas say

    def _heard(self, link: ReplicaLink, news: News) -> None:
        now = time.monotonic()
        for request_id, delta in news.pieces:
            work = self._work.get(request_id)
            if work is None or work.link is not link or work.answer.done():
                continue  # nobody waits for it here any more
            link.pace = link.pace.plus(*work.unanswered.take(delta, now))
            self._count(work)
            if work.unanswered.answered:
                work.answer.set_result(work.unanswered.completions())
        if news.pieces:
            link.progressed = now
            self._count_busy(now)
        for refusal in news.refused:
            work = self._work.get(refusal.request_id)
            if work is None or work.link is not link or work.answer.done():
                continue
            if refusal.kind == OTHER_VERSION:
                self._take_away(work)
            else:
                work.answer.set_exception(refusal.error)
        self._place_all()

    def _count_busy(self, now: float) -> None:
        self.busy_s += max(0.0, now - self._since)
        self._since = now

    # Looking after them

    async def _look_after(self) -> None:
        while True:
            self.given_up = await self._links.look()
            self._drop_the_slow()
            self._links.give_up_stuck(self._limit_s)
            self._watch_the_wait()
            self._starved = self._is_starved()
            await asyncio.sleep(self._patience.look_s)

    def _drop_the_slow(self) -> None:
        ready = self._links.ready(self._policy_version)
        asked = {start: link for start, link in ready.items() if not link.slow}
        for start in too_slow({start: link.pace for start, link in asked.items()}):
            link = asked[start]
            link.slow = True
            logger.warning("%s is far slower than the others: it is asked nothing until the next refit", link.name)
            self._ask_elsewhere(link)

    def _is_starved(self) -> bool:
        waiting = any(work.link is None and not work.answer.done() for work in self._work.values())
        return waiting and bool(self._links.reached) and not self._links.ready(self._policy_version)

    def _watch_the_wait(self) -> None:
        """While requests wait for a replica: say so, and give up in the end."""
        waiting = [work for work in self._work.values() if work.link is None and not work.answer.done()]
        if not waiting or self._nobody_since is None:
            return
        now = time.monotonic()
        self._count_busy(now)
        waited = now - self._nobody_since
        if self.given_up is not None or waited > self._limit_s:
            error = NoReplica(
                f"all inference replicas are given up: {self.given_up}"
                if self.given_up is not None
                else f"no inference replica could be asked for {waited:.0f} s (job.silence_limit_s): the logs of the "
                "replicas (infer-0, ...) say why"
            )
            for work in waiting:
                work.answer.set_exception(error)
        elif now - self._said_at >= self._patience.say_s:
            self._said_at = now
            logger.warning("waiting for an inference replica with weights of version %d", self._policy_version)
