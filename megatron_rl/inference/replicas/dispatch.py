"""Which replica answers which request, and what becomes of those whose replica is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping
from statistics import median
from typing import Any

from megatron_rl.contract.paths import Attempt
from megatron_rl.inference.api import Completion, GenerationRequest, PartialAnswer
from megatron_rl.inference.replicas.link import LinkTimings, Pace, ReplicaGone, ReplicaLink
from megatron_rl.inference.replicas.links import ReplicaLinks, Start
from megatron_rl.inference.replicas.unanswered import Unanswered
from megatron_rl.inference.replicas.wire import OTHER_VERSION, News
from megatron_rl.inference.request_limits import refuse_duplicate

logger = logging.getLogger(__name__)

SLOWER = 4.0
"""Times longer than the others for a token: then a replica is asked no more."""
MEASURED_S = 60.0
"""Seconds of decoding, of all its samples together, by which a replica is judged."""
END_S = 3.0
"""That replicas have to hear that they are to end."""


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


class Dispatch:
    """The requests of one driver. All methods are for one asyncio loop; what stands without an underscore may be read
    from elsewhere."""

    def __init__(
        self,
        attempt: Attempt,
        digest: str,
        token: str,
        driver: int,
        *,
        goes_on: bool,
        limit_s: float,
        timings: LinkTimings | None = None,
    ) -> None:
        """
        digest: see `wire.digest_of`.
        token: the run's.
        driver: number of this one; the first one keeps the replicas alive.
        goes_on: whether an answer whose replica is lost goes on from its tokens, or is sampled again: see
            `resume.partial`.
        limit_s: that it may take until any replica can be asked, or one that is asked has a token.
        """
        self.policy_version = -1
        """Requests are for replicas with weights of this version or a newer one. May be set from elsewhere, before
        `begin_version`."""
        self.starved = False
        """See ReplicaPool.starved."""
        self.busy_s = 0.0
        """See ReplicaPool.busy_s."""
        self.given_up: str | None = None
        """See ReplicaPool.given_up."""
        self._goes_on, self._limit_s, self._timings = goes_on, limit_s, timings or LinkTimings()
        self._links = ReplicaLinks(
            attempt, digest, token, driver, self._timings, self._spawn, self._heard, self._ask_elsewhere
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._work: dict[str, _Work] = {}  # by the name under which it is asked now
        self._homes: dict[int, Start] = {}  # ordinal: where its prompt is
        self._newest_ordinal = -1  # that anything was asked about
        self._held_after: int | None = None  # while a version is on its way: the newest ordinal of before
        self._repeated = 0  # requests asked again because their replica was lost or slow, since `metrics`
        self._since = time.monotonic()  # until when `busy_s` counts
        self._nobody_since: float | None = None
        self._said_at = 0.0
        self._failure: BaseException | None = None

    def begin(self) -> None:
        """Look for replicas from now on."""
        self._spawn(self._look_after())

    async def close(self, *, end: bool) -> None:
        """See ReplicaPool.close."""
        if end:
            await self._links.end(END_S)
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def starts(self) -> dict[Start, int]:
        """See ReplicaPool.starts."""
        return {start: link.about.ranks for start, link in self._links.reached.items() if link.about is not None}

    async def metrics(self) -> dict[str, float]:
        """See ReplicaPool.metrics."""
        repeated, self._repeated = self._repeated, 0
        ready = self._links.ready(self.policy_version).values()
        found: dict[str, float] = {
            "system/replicas": len(ready),
            "system/slow_replicas": sum(link.slow for link in ready),
            "system/repeated_requests": repeated,
        }
        if (share := self._links.busy_share()) is not None:
            found["system/replica_busy_mean"] = share
        return found

    async def partial_answers(self) -> list[PartialAnswer]:
        """See ReplicaPool.partial_answers."""
        return [part for work in self._work.values() for part in work.unanswered.partial_answers()]

    async def call(self, start: Start, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """See ReplicaPool.call."""
        link = self._links.get(start)
        if link is None:
            raise ReplicaGone(f"replica {start[0]} (start {start[1]}) is gone")
        return await link.call(path, body, timeout_s)

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """See ReplicaPool.generate."""
        if self._failure is not None:
            raise self._failure
        refuse_duplicate(request, self._work)
        if not self._work:
            self._since = time.monotonic()
        work = self._work[request.id] = _Work(request)
        if request.ordinal is not None:
            self._newest_ordinal = max(self._newest_ordinal, request.ordinal)
        self._place(work)
        try:
            return await work.answer
        finally:
            asked = work.unanswered.request.id
            del self._work[asked]
            if work.link is not None:
                if not work.unanswered.answered:
                    work.link.cancel(asked)
                self._take_away(work)

    def hold(self) -> None:
        """See ReplicaPool.announce."""
        self._held_after = self._newest_ordinal

    def begin_version(self) -> None:
        """Ask for answers by `policy_version` what waited for it."""
        self._held_after = None
        self._homes.clear()
        for link in self._links.reached.values():
            link.pace, link.slow = Pace(), False
        self._place_all()

    # Which replica is asked

    def _place(self, work: _Work) -> None:
        """Ask a replica, if there is any to ask; else the request waits."""
        request = work.unanswered.request
        if self._held_after is not None and (request.ordinal is None or request.ordinal > self._held_after):
            return
        ready = self._links.ready(self.policy_version)
        fast = {start: link for start, link in ready.items() if not link.slow}
        candidates = fast or ready
        if not candidates:
            if self._nobody_since is None:
                self._nobody_since = self._said_at = time.monotonic()
            return
        self._nobody_since = None
        start = None if request.ordinal is None else self._homes.get(request.ordinal)
        if start not in candidates:  # the first of those with the fewest outstanding tokens
            start = min(candidates, key=lambda each: candidates[each].outstanding)
        if request.ordinal is not None:
            self._homes[request.ordinal] = start
        work.link = candidates[start]
        work.link.ask(request, self.policy_version)
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
            del self._work[work.unanswered.request.id]
            work.unanswered.begin_again(with_parts=self._goes_on)
            self._work[work.unanswered.request.id] = work
        self._repeated += len(moved)
        if moved:
            logger.warning("%d requests of %s are asked elsewhere", len(moved), link.name)
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

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
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

    async def _look_after(self) -> None:
        while True:
            self.given_up = await self._links.look()
            self._drop_the_slow()
            self._links.give_up_stuck(self._limit_s)
            self._watch_the_wait()
            self.starved = self._is_starved()
            await asyncio.sleep(self._timings.look_s)

    def _drop_the_slow(self) -> None:
        ready = self._links.ready(self.policy_version)
        asked = {start: link for start, link in ready.items() if not link.slow}
        for start in too_slow({start: link.pace for start, link in asked.items()}):
            link = asked[start]
            link.slow = True
            logger.warning("%s is far slower than the others: it is asked nothing until the next refit", link.name)
            self._ask_elsewhere(link)

    def _is_starved(self) -> bool:
        waiting = any(work.link is None and not work.answer.done() for work in self._work.values())
        return waiting and bool(self._links.reached) and not self._links.ready(self.policy_version)

    def _watch_the_wait(self) -> None:
        """While requests wait for a replica: say so, and give up in the end."""
        waiting = [work for work in self._work.values() if work.link is None and not work.answer.done()]
        if not waiting:
            self._nobody_since = None  # who waited has gone away
        if self._nobody_since is None:
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
        elif now - self._said_at >= self._timings.say_s:
            self._said_at = now
            logger.warning("waiting for an inference replica with weights of version %d", self.policy_version)


def too_slow(paces: Mapping[Start, Pace]) -> list[Start]:
    """Replicas that take far longer for a token than the others do in the middle; none where there is but one that was
    measured."""
    measured = {key: pace for key, pace in paces.items() if pace.seconds >= MEASURED_S}
    slow = []
    for key, pace in measured.items():
        others = [other.seconds / max(1, other.tokens) for name, other in measured.items() if name != key]
        if others and pace.seconds / max(1, pace.tokens) > SLOWER * median(others):
            slow.append(key)
    return slow
