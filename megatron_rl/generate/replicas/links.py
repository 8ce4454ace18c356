"""The replicas that one driver is connected to, from their start until they are lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, NamedTuple

from megatron_rl.contract.attempt_records import ReplicaAddress, ReplicaState
from megatron_rl.contract.codes import REPLICA_GIVEN_UP
from megatron_rl.contract.paths import INFER, Attempt
from megatron_rl.contract.records import Unreadable, if_readable, read
from megatron_rl.generate.replicas.link import ReplicaGone, ReplicaLink, ReplicaRefuses
from megatron_rl.generate.replicas.shard import Shard
from megatron_rl.generate.replicas.speeds import Report, ReportSpan

logger = logging.getLogger(__name__)

ALL = Shard(driver=0, drivers=1)

Start = tuple[int, int]
"""(replica, number of its earlier starts)"""


class ReplicaLinks:
    def __init__(
        self,
        roster: Roster,
        link_to: Callable[[ReplicaAddress], ReplicaLink],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        on_loss: Callable[[ReplicaLink], None],
    ) -> None:
        """
        spawn: makes a task of the loop.
        on_loss: called with each replica that is lost.
        """
        self._roster, self._link_to, self._spawn, self._on_loss = roster, link_to, spawn, on_loss
        self._links: dict[Start, ReplicaLink] = {}
        self._keepers: dict[Start, asyncio.Task[None]] = {}
        self._avoided: set[Start] = set()  # starts that get no more requests: refused, or without any progress
        self._lost: set[Start] = set()  # starts that do not respond any more
        self._complained: set[str] = set()
        self._reports: dict[Start, Report] = {}  # at the last call of `spans`

    def get(self, start: Start) -> ReplicaLink | None:
        return self._links.get(start)

    @property
    def reached(self) -> dict[Start, ReplicaLink]:
        return {start: link for start, link in self._links.items() if link.about is not None}

    def ready(self, version: int) -> dict[Start, ReplicaLink]:
        """Links of replicas with weights of this version or a newer one, which may be requested any moment."""
        return {start: link for start, link in self._links.items() if link.ready(version)}

    @property
    def any_rests(self) -> bool:
        """Whether a replica is asleep or down."""
        return any(link.rests for link in self._links.values())

    def starved(self, version: int) -> bool:
        """Whether there are replicas, but none that has this version."""
        return bool(self.reached) and not self.ready(version)

    async def connect_new(self) -> str | None:
        """Connect to replicas that have started, as many as this driver needs, and leave those that had taken over from
        others which are back. Returns why there will be none any more; None if there may be."""
        responding = {start for start, link in self._links.items() if link.responds}
        self._lost -= responding
        found = await asyncio.to_thread(
            self._roster.read, frozenset(replica for replica, _ in responding), frozenset(self._lost | self._avoided)
        )
        for address in found.addresses:
            self._connect(address)
        for start, link in self._links.items():
            if found.wanted is not None and start[0] not in found.wanted and not link.outstanding:
                self._keepers[start].cancel()
        return found.given_up

    def give_up_stuck(self, limit_s: float) -> None:
        now = time.monotonic()
        for start, link in self._links.items():
            if link.rests:
                link.progressed = now  # its limit begins when it wakes
            elif link.outstanding and now - link.progressed > limit_s:
                logger.error("%s has sampled nothing for %.0f s: it gets no more requests", link.name, limit_s)
                self._avoided.add(start)
                self._keepers[start].cancel()

    def spans(self) -> list[ReportSpan]:
        """Return what each replica has reported since the last call."""
        # Replicas report what they have done since their start, so a span needs two reports. A start that is in only
        # one of them, because it came or went since the last call, says nothing:
        #
        #     before   {(0, 0): (100 s, busy 60 s), (1, 0): (100 s, busy 80 s)}
        #     now      {(0, 0): (110 s, busy 69 s), (1, 1): (110 s, busy 2 s)}        -> a span of replica 0 alone
        before = self._reports
        self._reports = {start: link.report for start, link in self._links.items() if link.report is not None}
        return [ReportSpan(then, self._reports[start]) for start, then in before.items() if start in self._reports]

    async def end(self, timeout_s: float) -> None:
        """Notify all replicas that the run no longer needs them. A replica that misses it ends by itself."""
        calls = [asyncio.ensure_future(link.post("end", {})) for link in self._links.values()]
        if calls:
            await asyncio.wait(calls, timeout=timeout_s)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    def _connect(self, address: ReplicaAddress) -> None:
        start = (address.replica, address.start)
        if start not in self._links and start not in self._avoided:
            self._links[start] = link = self._link_to(address)
            self._keepers[start] = self._spawn(self._keep(start, link))

    async def _keep(self, start: Start, link: ReplicaLink) -> None:
        try:
            await link.run()
        except ReplicaRefuses as error:
            self._avoided.add(start)
            logger.error("%s", error)
        except ReplicaGone as error:
            # The network may be at fault: the replica is connected again if it responds.
            self._lost.add(start)
            if str(error) not in self._complained:
                self._complained.add(str(error))
                logger.warning("%s", error)
        finally:
            del self._links[start], self._keepers[start]
            self._on_loss(link)


class Found(NamedTuple):
    addresses: list[ReplicaAddress]
    """Addresses of replicas that do not respond yet, in the order in which this driver prefers them."""
    wanted: Collection[int] | None
    """Replicas that this driver needs, of which some may not be there yet; None: unknown."""
    given_up: str | None
    """Why there will be no replicas any more; None if there may be."""


class Roster:
    """Addresses and states that replicas and the host side write. Reading files may be slow, so it needs a thread."""

    def __init__(self, attempt: Attempt, kind: str = INFER, shard: Shard = ALL) -> None:
        """kind: of the replicas."""
        self._attempt, self._kind, self._shard = attempt, kind, shard
        self._complained: set[str] = set()

    def read(self, responding: frozenset[int] = frozenset(), lost: frozenset[Start] = frozenset()) -> Found:
        """Look for replicas that are there. Problems are logged once.

        responding: replicas at addresses that are known. None of their files is read.
        lost: starts that no longer respond, in whose place others are needed.
        """
        try:
            numbers = self._attempt.replica_numbers(self._kind)
        except OSError as error:
            self._complain(f"the replicas cannot be listed: {error}")
            return Found([], None, None)
        preferred, needed = self._shard.preferred(numbers)
        addresses: list[ReplicaAddress] = []
        wanted = set()
        for number in preferred:
            if not needed:
                break
            wanted.add(number)
            if number in responding:
                needed -= 1
            elif (address := self._address(number)) is not None:
                addresses.append(address)
                needed -= (number, address.start) not in lost
        return Found(addresses, wanted, None if responding.intersection(numbers) else self._all_given_up(numbers))

    def _address(self, number: int) -> ReplicaAddress | None:
        found = read(ReplicaAddress, self._attempt.replica(number, self._kind).listener)
        if isinstance(found, Unreadable):
            self._complain(str(found))
        return if_readable(found)

    def _all_given_up(self, numbers: Sequence[int]) -> str | None:
        why = None
        for number in numbers:
            state = if_readable(read(ReplicaState, self._attempt.replica(number, self._kind).state))
            if state is None or state.state != REPLICA_GIVEN_UP:
                return None
            why = why or state.why or "each replica ended too often"
        return why

    def _complain(self, what: str) -> None:
        if what not in self._complained:
            self._complained.add(what)
            logger.warning("%s", what)
