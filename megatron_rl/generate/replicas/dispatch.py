"""Choose a replica for each request, and recover requests whose replica is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping
from statistics import fmean, median
from typing import Any

from megatron_rl.contract.attempt_records import ReplicaAddress
from megatron_rl.contract.paths import Attempt
from megatron_rl.generate.engine.interface import Completion, GenerationRequest, PartialAnswer
from megatron_rl.generate.engine.request_limits import refuse_duplicate
from megatron_rl.generate.replicas.link import DecodePace, LinkTimings, ReplicaGone, ReplicaLink
from megatron_rl.generate.replicas.links import ReplicaLinks, Roster, Start
from megatron_rl.generate.replicas.speeds import speeds
from megatron_rl.generate.replicas.unanswered import Unanswered
from megatron_rl.generate.replicas.wire import OTHER_VERSION, News, State

logger = logging.getLogger(__name__)

SLOWER = 4.0
"""A replica that needs this many times the others' seconds per token gets no more requests."""
MEASURED_S = 60.0
"""Seconds of decoding, summed over its samples, before a replica is judged."""
END_S = 3.0
"""Seconds to notify replicas of the end of the run."""


class NoReplica(RuntimeError):
    """No replica could be asked within the limit."""


class _Work:
    def __init__(self, request: GenerationRequest) -> None:
        self.unanswered = Unanswered(request)
        self.answer: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        self.link: ReplicaLink | None = None
        """Link of the replica that was asked; None while the request waits."""
        self.counted = 0

    @property
    def waiting(self) -> bool:
        return self.link is None and not self.answer.done()

    def awaits(self, link: ReplicaLink) -> bool:
        return self.link is link and not self.answer.done()

    def count(self) -> None:
        assert self.link is not None
        outstanding = self.unanswered.outstanding
        self.link.outstanding += outstanding - self.counted
        self.counted = outstanding

    def unassign(self) -> None:
        assert self.link is not None
        self.link.outstanding -= self.counted
        self.link, self.counted = None, 0


class Dispatch:
    """The requests of one driver. All methods belong to one asyncio loop; other threads may read the public
    attributes."""

    def __init__(
        self,
        attempt: Attempt,
        digest: str,
        token: str,
        driver: int,
        *,
        resumes: bool,
        limit_s: float,
        timings: LinkTimings | None = None,
    ) -> None:
        """
        digest: see `wire.digest_of`.
        token: the run's token.
        driver: number of this driver; requests of driver 0 keep the replicas alive.
        resumes: whether an answer whose replica is lost resumes from its tokens, see `resume.partial`. If not, it is
            sampled again.
        limit_s: seconds until a replica must be available, and until a replica with requests must have tokens. While
            a replica is asleep or down, no wait counts: training has its device.
        """
        self.policy_version = -1
        """Requests go to replicas with weights of this version or a newer one. Other threads may set it, before
        `begin_version`."""
        self.starved = False
        self.busy_s = 0.0
        self.given_up: str | None = None
        self._resumes, self._limit_s, self._timings = resumes, limit_s, timings or LinkTimings()
        self._links = ReplicaLinks(
            Roster(attempt.replicas),
            lambda address: ReplicaLink(address, token, digest, driver, self._timings, self._take_news),
            self._spawn,
            self._ask_elsewhere,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._work: dict[str, _Work] = {}  # by the id under which a replica is asked
        self._homes: dict[int, Start] = {}  # ordinal -> replica that has its prompt in the cache
        self._newest_ordinal = -1  # largest ordinal of any request
        self._held_after: int | None = None  # while a version is on its way: largest ordinal before its announcement
        self._repeated = 0  # requests repeated since `metrics`, because their replica was lost or slow
        self._since = time.monotonic()  # up to when `busy_s` counts
        self._nobody_since: float | None = None
        self._logged_at = 0.0
        self._failure: BaseException | None = None

    def begin(self) -> None:
        self._spawn(self._supervise())

    async def close(self, *, end: bool) -> None:
        if end:
            await self._links.end(END_S)
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def reached(self) -> dict[Start, tuple[ReplicaAddress, State]]:
        found = self._links.reached.items()
        return {start: (link.address, link.about.state) for start, link in found if link.about is not None}

    async def metrics(self) -> dict[str, float]:
        repeated, self._repeated = self._repeated, 0
        ready = self._links.ready(self.policy_version)
        present = [link for start, link in self._links.reached.items() if start in ready or link.asleep]
        found: dict[str, float] = {
            "system/replicas": len(present),
            "system/slow_replicas": sum(link.slow for link in present),
            "system/repeated_requests": repeated,
        }
        if abouts := [link.about for link in present if link.about is not None]:
            found["system/replica_running_mean"] = fmean(about.running for about in abouts)
            found["system/replica_waiting_mean"] = fmean(about.waiting for about in abouts)
            found["system/replica_cache_used_mean"] = fmean(about.cache_used for about in abouts)
            found["system/replica_preemptions"] = sum(about.preemptions for about in abouts)
        return found | speeds(self._links.spans())

    async def partial_answers(self) -> list[PartialAnswer]:
        return [part for work in self._work.values() for part in work.unanswered.partial_answers()]

    async def call(self, start: Start, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        link = self._links.get(start)
        if link is None:
            raise ReplicaGone(f"replica {start[0]} (start {start[1]}) is gone")
        return await link.call(path, body, timeout_s)

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        if self._failure is not None:
            raise self._failure
        refuse_duplicate(request, self._work)
        if not self._work:
            self._since = time.monotonic()
        work = self._work[request.id] = _Work(request)
        if request.ordinal is not None:
            self._newest_ordinal = max(self._newest_ordinal, request.ordinal)
        self._assign(work)
        try:
            return await work.answer
        finally:
            asked = work.unanswered.request.id
            del self._work[asked]
            if work.link is not None:
                if not work.unanswered.answered:
                    work.link.cancel(asked)
                work.unassign()

    def hold(self) -> None:
        self._held_after = self._newest_ordinal

    def begin_version(self) -> None:
        self._held_after = None
        self._homes.clear()
        for link in self._links.reached.values():
            link.pace, link.slow = DecodePace(), False
        for work in self._work.values():
            work.unanswered.restart_clock()
        self._assign_waiting()

    # Assignment of requests to replicas

    def _assign(self, work: _Work) -> None:
        """Ask a replica. Without a suitable one the request waits."""
        # While a version is on its way, prompts that nobody has begun wait for it; the others go on, or the training
        # step that needs their answers would wait for weights that only this step can make. Say 0 to 7 were requested
        # when the version was announced:
        #
        #     5    a further turn of a begun prompt: sent now, to the present weights
        #     8    a new prompt: waits until `begin_version`
        request = work.unanswered.request
        if self._held_after is not None and (request.ordinal is None or request.ordinal > self._held_after):
            return
        ready = self._links.ready(self.policy_version)
        fast = {start: link for start, link in ready.items() if not link.slow}
        candidates = fast or ready
        if not candidates:
            if self._nobody_since is None:
                self._nobody_since = self._logged_at = time.monotonic()
            return
        self._nobody_since = None
        start = None if request.ordinal is None else self._homes.get(request.ordinal)
        if start not in candidates:  # then the one with the fewest outstanding tokens
            start = min(candidates, key=lambda each: candidates[each].outstanding)
        if request.ordinal is not None:
            self._homes[request.ordinal] = start
        work.link = candidates[start]
        work.link.ask(request, self.policy_version)
        work.count()

    def _assign_waiting(self) -> None:
        for work in self._work.values():
            if work.waiting:
                self._assign(work)

    def _ask_elsewhere(self, link: ReplicaLink) -> None:
        moved = [work for work in self._work.values() if work.awaits(link)]
        for work in moved:
            link.cancel(work.unanswered.request.id)
            work.unassign()
            del self._work[work.unanswered.request.id]
            work.unanswered.begin_again(with_parts=self._resumes)
            self._work[work.unanswered.request.id] = work
        self._repeated += len(moved)
        if moved:
            logger.warning("%d requests of %s are repeated on other replicas", len(moved), link.name)
        self._assign_waiting()

    # News of replicas

    def _take_news(self, link: ReplicaLink, news: News) -> None:
        now = time.monotonic()
        for request_id, delta in news.pieces:
            if (work := self._work.get(request_id)) is not None and work.awaits(link):
                link.pace = link.pace.plus(*work.unanswered.take(delta, now))
                work.count()
                if work.unanswered.answered:
                    work.answer.set_result(work.unanswered.completions())
        if news.pieces:
            link.progressed = now
            self._count_busy(now)
        for refusal in news.refused:
            if (work := self._work.get(refusal.request_id)) is not None and work.awaits(link):
                if refusal.kind == OTHER_VERSION:
                    work.unassign()
                else:
                    work.answer.set_exception(refusal.error)
        self._assign_waiting()

    def _count_busy(self, now: float) -> None:
        self.busy_s += max(0.0, now - self._since)
        self._since = now

    # Supervision of replicas

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[None]) -> None:
        """Nobody awaits these tasks: raise their unexpected errors in all callers."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the supervision of replicas has failed: %r", error)
            self._failure = error
            for work in self._work.values():
                if not work.answer.done():
                    work.answer.set_exception(error)

    async def _supervise(self) -> None:
        while True:
            self.given_up = await self._links.connect_new()
            self._exclude_slow()
            self._links.give_up_stuck(self._limit_s)
            waiting = [work for work in self._work.values() if work.waiting]
            self._check_wait(waiting)
            self.starved = bool(waiting) and self._links.starved(self.policy_version)
            await asyncio.sleep(self._timings.check_s)

    def _exclude_slow(self) -> None:
        ready = self._links.ready(self.policy_version)
        asked = {start: link for start, link in ready.items() if not link.slow}
        for start in too_slow({start: link.pace for start, link in asked.items()}):
            link = asked[start]
            link.slow = True
            logger.warning("%s is far slower than the others: it gets no requests until the next refit", link.name)
            self._ask_elsewhere(link)

    def _check_wait(self, waiting: list[_Work]) -> None:
        """Log that requests wait for a replica, and fail them when the limit is over."""
        if not waiting:
            self._nobody_since = None  # their callers have left
        if self._nobody_since is None:
            return
        now = time.monotonic()
        self._count_busy(now)
        if self._links.any_rests:
            self._nobody_since = self._logged_at = now
        waited = now - self._nobody_since
        if self.given_up is not None or waited > self._limit_s:
            error = NoReplica(
                f"all inference replicas are given up: {self.given_up}"
                if self.given_up is not None
                else f"no inference replica was available for {waited:.0f} s (job.silence_limit_s): see "
                "the logs of the replicas (infer-0, ...)"
            )
            for work in waiting:
                work.answer.set_exception(error)
        elif now - self._logged_at >= self._timings.log_s:
            self._logged_at = now
            logger.warning("waiting for an inference replica with weights of version %d", self.policy_version)


def too_slow(paces: Mapping[Start, DecodePace]) -> list[Start]:
    """Return the replicas whose seconds per token exceed SLOWER times the median of the others; none if only one was
    measured."""
    measured = {key: pace.seconds / max(1, pace.tokens) for key, pace in paces.items() if pace.seconds >= MEASURED_S}
    slow = []
    for key, per_token in measured.items():
        others = [other for name, other in measured.items() if name != key]
        if others and per_token > SLOWER * median(others):
            slow.append(key)
    return slow
