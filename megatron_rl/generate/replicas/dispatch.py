"""Requests of one driver to all replicas: answers as they arrive, and supervision of the replicas."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Coroutine
from functools import partial
from statistics import fmean
from typing import Any

from megatron_rl.contract.attempt_records import ReplicaAddress
from megatron_rl.contract.paths import Attempt
from megatron_rl.generate.engine.interface import Completion, GenerationRequest, PartialAnswer
from megatron_rl.generate.replicas.assignment import Assignment
from megatron_rl.generate.replicas.link import LinkTimings, ReplicaGone, ReplicaLink
from megatron_rl.generate.replicas.links import ReplicaLinks, Roster, Start
from megatron_rl.generate.replicas.paces import DecodePace, too_slow
from megatron_rl.generate.replicas.requests_in_flight import KeptWeights
from megatron_rl.generate.replicas.shard import Shard
from megatron_rl.generate.replicas.speeds import speeds
from megatron_rl.generate.replicas.wire import OTHER_VERSION, Garbled, News, State

logger = logging.getLogger(__name__)

END_S = 3.0
"""Seconds to notify replicas of the end of the run."""


class NoReplica(RuntimeError):
    """No replica could be asked within the limit."""


class Dispatch:
    """The requests of one driver. All methods belong to one asyncio loop; other threads may read the public
    attributes."""

    def __init__(
        self,
        attempt: Attempt,
        digest: str,
        token: str,
        shard: Shard,
        *,
        resumes: bool,
        limit_s: float,
        timings: LinkTimings | None = None,
    ) -> None:
        """
        digest: see `wire.digest_of`.
        token: the run's token.
        shard: share of this driver in the replicas; requests of driver 0 keep the replicas alive.
        resumes: whether an answer whose replica is lost resumes from its tokens, see `resume.partial`. If not, it is
            sampled again.
        limit_s: seconds until a replica must be available, and until a replica with requests must have tokens. While
            a replica is asleep or down, no wait counts: training has its device.
        """
        self.policy_version = -1
        """Requests go to replicas with weights of this version or a newer one. Other threads may set it, before
        `begin_version`."""
        self.vocab_size = math.inf
        """Tokens of the run's vocabulary, once it is known, which is before the first request. Embedding a token beyond
        it would end a rank by an index error. Other threads may set it."""
        self.starved = False
        self.busy_s = 0.0
        self.given_up: str | None = None
        self._limit_s, self._timings = limit_s, timings or LinkTimings()
        self._link = partial(ReplicaLink, token=token, digest=digest, driver=shard.driver, timings=self._timings)
        self._assignment = Assignment(lambda: self.policy_version, resumes=resumes)
        self._links = ReplicaLinks(Roster(attempt, shard=shard), self._link_to, self._spawn, self._assignment.lose)
        self._tasks: set[asyncio.Task[None]] = set()
        self._since = time.monotonic()  # up to when `busy_s` counts
        self._version_began = -math.inf
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
        repeated, self._assignment.repeated = self._assignment.repeated, 0
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
        return [part for work in self._assignment.requests for part in work.unanswered.partial_answers()]

    async def call(self, start: Start, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        link = self._links.get(start)
        if link is None:
            raise ReplicaGone(f"replica {start[0]} (start {start[1]}) is gone")
        return await link.call(path, body, timeout_s)

    async def ready(self) -> frozenset[Start]:
        """Return the replicas that have the newest weights."""
        return frozenset(self._links.ready(self.policy_version))

    async def generate(self, request: GenerationRequest, kept: KeptWeights | None = None) -> list[Completion]:
        if self._failure is not None:
            raise self._failure
        if not self._assignment.requests:
            self._since = time.monotonic()
        work = self._assignment.begin(request, kept)
        try:
            return await work.answer
        finally:
            self._assignment.end(work)

    def hold(self) -> None:
        self._assignment.hold()

    def begin_version(self) -> None:
        self._version_began = time.monotonic()
        for link in self._links.reached.values():
            link.pace = DecodePace()
        self._assignment.begin_version()

    # News of replicas

    def _link_to(self, address: ReplicaAddress) -> ReplicaLink:
        link = self._link(address, on_news=self._take_news, on_state=self._assignment.note)
        self._assignment.connect(link)
        return link

    def _take_news(self, link: ReplicaLink, news: News) -> None:
        now = time.monotonic()
        for request_id, delta in news.pieces:
            if (highest := max(delta.tokens, default=-1)) >= self.vocab_size:
                raise Garbled(f"it answers with token {highest}, and the vocabulary has {self.vocab_size} tokens")
            if (work := self._assignment.requests.asked(request_id, link)) is not None:
                link.pace = link.pace.plus(*work.unanswered.take(delta, now, self._version_began))
                work.count()
                if work.unanswered.answered:
                    work.answer.set_result(work.unanswered.completions())
        if news.pieces:
            link.progressed = now
            self._count_busy(now)
        for refusal in news.refused:
            if (work := self._assignment.requests.asked(refusal.request_id, link)) is not None:
                if refusal.kind == OTHER_VERSION:
                    self._assignment.set_aside(work)
                else:
                    work.answer.set_exception(refusal.error)
        self._assignment.note(link)
        self._assignment.place_waiting()

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
            for work in self._assignment.requests:
                if not work.answer.done():
                    work.answer.set_exception(error)

    async def _supervise(self) -> None:
        while True:
            self.given_up = await self._links.connect_new()
            self._exclude_slow()
            self._links.give_up_stuck(self._limit_s)
            waits = self._assignment.requests.any_waits
            self._check_wait(waits)
            self.starved = waits and self._links.starved(self.policy_version)
            await asyncio.sleep(self._timings.check_s)

    def _exclude_slow(self) -> None:
        ready = self._links.ready(self.policy_version)
        asked = {start: link for start, link in ready.items() if not link.slow}
        for start in too_slow({start: link.pace for start, link in asked.items()}):
            link = asked[start]
            link.slow = True
            logger.warning("%s is far slower than the others: it gets no requests until the next refit", link.name)
            self._assignment.move(link)

    def _check_wait(self, waits: bool) -> None:
        """Log that requests wait for a replica, and fail them when the limit is over.

        waits: whether any does.
        """
        if not waits:
            self._assignment.nobody_since = None  # their callers have left
        if (since := self._assignment.nobody_since) is None:
            return
        now = time.monotonic()
        self._count_busy(now)
        if self._links.any_rests:
            self._assignment.nobody_since = since = now
        waited = now - since
        if self.given_up is not None or waited > self._limit_s:
            error = NoReplica(
                f"all inference replicas are given up: {self.given_up}"
                if self.given_up is not None
                else f"no inference replica was available for {waited:.0f} s (job.silence_limit_s): see "
                "the logs of the replicas (infer-0, ...)"
            )
            for work in self._assignment.requests.waiting:
                work.answer.set_exception(error)
        elif now - max(since, self._logged_at) >= self._timings.log_s:
            self._logged_at = now
            logger.warning("waiting for an inference replica with weights of version %d", self.policy_version)
