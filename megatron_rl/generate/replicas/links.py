"""The replicas that one driver is connected to, from their start until they are lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Container, Coroutine, Sequence
from typing import Any

from megatron_rl.contract.attempt_records import ReplicaAddress, ReplicaState
from megatron_rl.contract.codes import REPLICA_GIVEN_UP
from megatron_rl.contract.paths import INFER, Attempt, Replica
from megatron_rl.contract.records import Absent, Unreadable, if_readable, read
from megatron_rl.generate.replicas.link import ReplicaGone, ReplicaLink, ReplicaRefuses
from megatron_rl.generate.replicas.speeds import Report, ReportSpan

logger = logging.getLogger(__name__)

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
        """Connect to replicas that have started. Returns why there will be none any more; None if there may be."""
        responding = {replica for (replica, _), link in self._links.items() if link.responds}
        addresses, given_up = await asyncio.to_thread(self._roster.read, responding)
        for address in addresses:
            self._connect(address)
        return given_up

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
            if str(error) not in self._complained:
                self._complained.add(str(error))
                logger.warning("%s", error)
        finally:
            del self._links[start], self._keepers[start]
            self._on_loss(link)


class Roster:
    """Addresses and states that replicas and the host side write. Reading files may be slow, so it needs a thread."""

    def __init__(self, attempt: Attempt, kind: str = INFER) -> None:
        """kind: of the replicas."""
        self._attempt, self._kind = attempt, kind
        self._complained: set[str] = set()

    def read(self, responding: Container[int] = ()) -> tuple[list[ReplicaAddress], str | None]:
        """Return the addresses of replicas, and why there will be none any more; None if there may be. Problems
        are logged once.

        responding: replicas at addresses that are known. None of their files is read.
        """
        try:
            numbers = self._attempt.replica_numbers(self._kind)
        except OSError as error:
            self._complain(f"the replicas cannot be listed: {error}")
            return [], None
        silent = [self._attempt.replica(number, self._kind) for number in numbers if number not in responding]
        addresses: list[ReplicaAddress] = []
        for replica in silent:
            found = read(ReplicaAddress, replica.listener)
            if isinstance(found, Unreadable):
                self._complain(str(found))
            elif not isinstance(found, Absent):
                addresses.append(found)
        return addresses, _all_given_up(silent) if len(silent) == len(numbers) else None

    def _complain(self, what: str) -> None:
        if what not in self._complained:
            self._complained.add(what)
            logger.warning("%s", what)


def _all_given_up(replicas: Sequence[Replica]) -> str | None:
    why = None
    for replica in replicas:
        state = if_readable(read(ReplicaState, replica.state))
        if state is None or state.state != REPLICA_GIVEN_UP:
            return None
        why = why or state.why or "each replica ended too often"
    return why
