"""Choice of the replica for each request of one driver, and the requests that wait for one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from megatron_rl.generate.engine.interface import GenerationRequest, WeightsGone
from megatron_rl.generate.replicas.link import ReplicaLink
from megatron_rl.generate.replicas.links import Start
from megatron_rl.generate.replicas.ranking import Ranking
from megatron_rl.generate.replicas.requests_in_flight import KeptWeights, RequestInFlight, RequestsInFlight

logger = logging.getLogger(__name__)


class Assignment:
    """A request goes to the replica that has its prompt in the cache, otherwise to the one with the fewest outstanding
    tokens of this driver. Replicas that are far slower than the others are asked only if all are slow.

    No method looks at all requests in flight or at all replicas, except at the beginning of a version."""

    def __init__(self, version: Callable[[], int], *, resumes: bool) -> None:
        """
        version: returns the policy version from which on weights may be used.
        resumes: whether an answer whose replica is lost resumes from its tokens.
        """
        self.requests = RequestsInFlight()
        self.repeated = 0
        """Requests that were repeated because their replica was lost or slow. The caller resets it."""
        self.nobody_since: float | None = None
        """Time since when requests found no replica (time.monotonic); None if they found one. The caller resets it
        when none waits any more."""
        self._version, self._resumes = version, resumes
        self._links: dict[Start, ReplicaLink] = {}
        self._ranking: Ranking[ReplicaLink] = Ranking(
            lambda link: (not link.ready(version()), link.slow, link.outstanding)
        )
        self._homes: dict[int, Start] = {}  # ordinal -> replica that has its prompt in the cache
        self._newest_ordinal = -1  # largest ordinal of any request
        self._held_after: int | None = None  # while a version is on its way: largest ordinal before its announcement

    # Replicas

    def connect(self, link: ReplicaLink) -> None:
        self._links[link.start] = link
        self._ranking.add(link)

    def note(self, link: ReplicaLink) -> None:
        """Take notice of a replica's new state. Requests that wait are assigned by `place_waiting`."""
        self._ranking.note(link)

    def lose(self, link: ReplicaLink) -> None:
        del self._links[link.start]
        self._ranking.discard(link)
        self.move(link)

    def move(self, link: ReplicaLink) -> None:
        """Repeat the requests of a replica that is lost or slow on others."""
        moved = self.requests.on(link)
        for work in moved:
            link.cancel(work.id)
            self.set_aside(work)
            self.requests.begin_again(work, with_parts=self._resumes and not work.unanswered.request.grammar)
        self.repeated += len(moved)
        if moved:
            logger.warning("%d requests of %s are repeated on other replicas", len(moved), link.name)
        self.place_waiting()

    # Versions

    def hold(self) -> None:
        self._held_after = self._newest_ordinal
        self._sort_waiting()

    def begin_version(self) -> None:
        self._held_after = None
        self._homes.clear()
        for link in self._links.values():
            link.slow = False
            self._ranking.note(link)
        self._sort_waiting()
        self.place_waiting()

    # Requests

    def begin(self, request: GenerationRequest, kept: KeptWeights | None = None) -> RequestInFlight:
        """Raises ValueError if a request with this id is in flight."""
        work = self.requests.add(request, kept)
        if request.ordinal is not None:
            self._newest_ordinal = max(self._newest_ordinal, request.ordinal)
        self._assign(work)
        return work

    def end(self, work: RequestInFlight) -> None:
        """Forget a request, which its replica must not answer any more."""
        link = work.link
        self.requests.remove(work)
        if link is not None:
            if not work.unanswered.answered:
                link.cancel(work.id)
            self._ranking.note(link)

    def set_aside(self, work: RequestInFlight) -> None:
        """Let a request wait that no replica is asked for any more."""
        self.requests.wait(work, held=self._is_held(work.unanswered.request))

    def place_waiting(self) -> None:
        """Assign the requests that found no replica, if there is one now."""
        for work in self.requests.for_kept_weights:
            self._assign(work)
        if self.requests.any_unplaced:
            if self._first_ready() is None:
                self._note_wait()
            else:
                for work in self.requests.unplaced:
                    self._assign(work)

    def _assign(self, work: RequestInFlight) -> None:
        """Ask a replica. Without a suitable one the request waits."""
        if work.kept is not None:
            self._assign_kept(work, work.kept)
            return
        request = work.unanswered.request
        if self._is_held(request):
            self.requests.wait(work, held=True)
            return
        if (first := self._first_ready()) is None:
            self.requests.wait(work, held=False)
            self._note_wait()
            return
        self.nobody_since = None
        link = self._home(request, first) or first
        if request.ordinal is not None:
            self._homes[request.ordinal] = link.start
        link.ask(request, self._version())  # before its tokens count, which show whether the replica was idle
        self.requests.place(work, link)

    def _assign_kept(self, work: RequestInFlight, kept: KeptWeights) -> None:
        """Ask the least busy of the replicas that keep these weights. The request fails if none is left, and waits
        while one has not said yet that it has them."""
        there = [self._links[start] for start in sorted(kept.starts) if start in self._links]
        if able := [link for link in there if not link.rests and link.version == kept.version]:
            link = min(able, key=lambda link: (link.slow, link.outstanding))
            link.ask(work.unanswered.request, kept.version)
            self.requests.place(work, link)
        elif any(link.version < kept.version for link in there):
            self.requests.wait(work, held=False)
        else:
            self.requests.fail(work, WeightsGone(f"the replicas that kept weights of version {kept.version} are lost"))

    def _is_held(self, request: GenerationRequest) -> bool:
        # While a version is on its way, prompts that nobody has begun wait for it; the others go on, or the training
        # step that needs their answers would wait for weights that only this step can make. Say 0 to 7 were requested
        # when the version was announced:
        #
        #     5    a further turn of a begun prompt: sent now, to the present weights
        #     8    a new prompt: waits until `begin_version`
        return self._held_after is not None and (request.ordinal is None or request.ordinal > self._held_after)

    def _sort_waiting(self) -> None:
        for work in self.requests.waiting:
            self.set_aside(work)

    def _first_ready(self) -> ReplicaLink | None:
        first = self._ranking.first()
        return first if first is not None and first.ready(self._version()) else None

    def _home(self, request: GenerationRequest, first: ReplicaLink) -> ReplicaLink | None:
        """Return the replica that has the prompt in its cache; None if it is lost, not ready, or slower than the other
        replicas.

        first: the one that is asked otherwise.
        """
        if request.ordinal is None or (start := self._homes.get(request.ordinal)) is None:
            return None
        home = self._links.get(start)
        fits = home is not None and home.ready(self._version()) and home.slow <= first.slow
        return home if fits else None

    def _note_wait(self) -> None:
        if self.nobody_since is None:
            self.nobody_since = time.monotonic()
