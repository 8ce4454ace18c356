"""Requests of one driver that are not answered yet: by id, by the replica that was asked, and those that wait."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import NamedTuple

from megatron_rl.generate.engine.interface import Completion, GenerationRequest
from megatron_rl.generate.engine.request_limits import refuse_duplicate
from megatron_rl.generate.replicas.link import ReplicaLink
from megatron_rl.generate.replicas.links import Start
from megatron_rl.generate.replicas.unanswered import Unanswered


class KeptWeights(NamedTuple):
    """Weights that some replicas keep for a while, although the others get newer ones."""

    version: int
    starts: frozenset[Start]


class RequestInFlight:
    def __init__(self, request: GenerationRequest, kept: KeptWeights | None = None) -> None:
        """kept: the only weights that may answer it; None: any that are new enough."""
        self.unanswered = Unanswered(request)
        self.kept = kept
        self.answer: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        self.link: ReplicaLink | None = None
        """Link of the replica that was asked; None while the request waits."""
        self.number = 0
        """Position in the order in which requests are assigned."""
        self._counted = 0

    @property
    def id(self) -> str:
        """Id under which a replica is asked."""
        return self.unanswered.request.id

    def count(self) -> None:
        assert self.link is not None
        outstanding = self.unanswered.outstanding
        self.link.outstanding += outstanding - self._counted
        self._counted = outstanding

    def put(self, link: ReplicaLink | None) -> None:
        if self.link is not None:
            self.link.outstanding -= self._counted
        self.link, self._counted = link, 0
        if link is not None:
            self.count()


class RequestsInFlight:
    """A request is on a replica, unplaced (no replica could be asked) or held (it waits for a version). Those that are
    done, but whose caller has not noticed yet, are in none of the lists. Requests for kept weights that wait for one of
    their replicas are in another list."""

    def __init__(self) -> None:
        self._by_id: dict[str, RequestInFlight] = {}
        self._by_link: dict[ReplicaLink, set[RequestInFlight]] = {}
        self._unplaced: set[RequestInFlight] = set()
        self._held: set[RequestInFlight] = set()
        self._kept: set[RequestInFlight] = set()
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[RequestInFlight]:
        return iter(self._by_id.values())

    def add(self, request: GenerationRequest, kept: KeptWeights | None = None) -> RequestInFlight:
        """Raises ValueError if a request with this id is in flight."""
        refuse_duplicate(request, self._by_id)
        work = RequestInFlight(request, kept)
        self._enter(work)
        return work

    def begin_again(self, work: RequestInFlight, *, with_parts: bool) -> None:
        """Let a request that waits begin again as `Unanswered.begin_again` does. It comes last in the order."""
        del self._by_id[work.id]
        work.unanswered.begin_again(with_parts=with_parts)
        self._enter(work)

    def _enter(self, work: RequestInFlight) -> None:
        work.number = next(self._numbers)
        self._by_id[work.id] = work

    def wait(self, work: RequestInFlight, *, held: bool) -> None:
        self._leave(work)
        work.put(None)
        (self._kept if work.kept else self._held if held else self._unplaced).add(work)

    def fail(self, work: RequestInFlight, error: Exception) -> None:
        self._leave(work)
        work.put(None)
        work.answer.set_exception(error)

    def place(self, work: RequestInFlight, link: ReplicaLink) -> None:
        self._leave(work)
        work.put(link)
        self._by_link.setdefault(link, set()).add(work)

    def remove(self, work: RequestInFlight) -> None:
        self._leave(work)
        work.put(None)
        del self._by_id[work.id]

    def _leave(self, work: RequestInFlight) -> None:
        if work.link is None:
            self._unplaced.discard(work)
            self._held.discard(work)
            self._kept.discard(work)
            return
        there = self._by_link[work.link]
        there.discard(work)
        if not there:
            del self._by_link[work.link]

    def asked(self, request_id: str, link: ReplicaLink) -> RequestInFlight | None:
        """Return the request that a replica was asked under this id; None if it is no longer expected of it."""
        work = self._by_id.get(request_id)
        return work if work is not None and work.link is link and not work.answer.done() else None

    def on(self, link: ReplicaLink) -> list[RequestInFlight]:
        return _in_order(self._by_link.get(link, ()))

    @property
    def unplaced(self) -> list[RequestInFlight]:
        return _in_order(self._unplaced)

    @property
    def for_kept_weights(self) -> list[RequestInFlight]:
        """Requests for kept weights that wait."""
        return _in_order(self._kept)

    @property
    def waiting(self) -> list[RequestInFlight]:
        """Unplaced and held ones."""
        return _in_order(self._unplaced | self._held)

    @property
    def any_unplaced(self) -> bool:
        return bool(self._unplaced)

    @property
    def any_waits(self) -> bool:
        return any(not work.answer.done() for each in (self._unplaced, self._held) for work in each)


def _in_order(some: Iterable[RequestInFlight]) -> list[RequestInFlight]:
    return sorted((work for work in some if not work.answer.done()), key=attrgetter("number"))
