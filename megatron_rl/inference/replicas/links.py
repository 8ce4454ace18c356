"""The replicas that one driver is in touch with: met when they come up, kept until they are lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from statistics import fmean
from typing import Any, NamedTuple

from megatron_rl.contract.attempt_records import ReplicaAddress, ReplicaState
from megatron_rl.contract.codes import REPLICA_GIVEN_UP
from megatron_rl.contract.paths import Attempt
from megatron_rl.contract.records import Absent, Unreadable, if_readable, read
from megatron_rl.inference.replicas.link import LinkTimings, ReplicaGone, ReplicaLink, ReplicaRefuses
from megatron_rl.inference.replicas.wire import PROTOCOL, News

logger = logging.getLogger(__name__)

Start = tuple[int, int]
"""Replica, and how often it was started before."""


class ReplicaLinks:
    """By start of a replica. All of it is for one asyncio loop."""

    def __init__(
        self,
        attempt: Attempt,
        digest: str,
        token: str,
        driver: int,
        timings: LinkTimings,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        heard: Callable[[ReplicaLink, News], None],
        lost: Callable[[ReplicaLink], None],
    ) -> None:
        """
        digest, token, driver: see Dispatch.
        spawn: makes a task of the loop.
        heard: told all news of each, in their order, and once.
        lost: told of each that is no longer there.
        """
        self._roster = Roster(attempt, digest)
        self._token, self._digest, self._driver, self._timings = token, digest, driver, timings
        self._spawn, self._heard, self._lost = spawn, heard, lost
        self._links: dict[Start, ReplicaLink] = {}
        self._keepers: dict[Start, asyncio.Task[None]] = {}
        self._avoided: set[Start] = set()  # starts that are not asked again: refused, or without any progress
        self._complained: set[str] = set()
        self._busy: dict[Start, tuple[float, float]] = {}  # see ReplicaLink.busy, when `busy_share` was asked before

    def get(self, start: Start) -> ReplicaLink | None:
        return self._links.get(start)

    @property
    def reached(self) -> dict[Start, ReplicaLink]:
        """Those that have said what they are."""
        return {start: link for start, link in self._links.items() if link.about is not None}

    def ready(self, version: int) -> dict[Start, ReplicaLink]:
        """Those that have weights of this version, or of a newer one: it may be about to be asked for."""
        return {start: link for start, link in self.reached.items() if link.version >= version}

    async def look(self) -> str | None:
        """Meet those that have come up. Returns why there will be none any more; None: there may be."""
        seen = await asyncio.to_thread(self._roster.look)
        for address in seen.addresses:
            self._meet(address)
        return seen.given_up

    def give_up_stuck(self, limit_s: float) -> None:
        """Ask those nothing again that answer, and have sampled nothing for so long."""
        now = time.monotonic()
        for start, link in self._links.items():
            if link.outstanding and now - link.progressed > limit_s:
                logger.error("%s has sampled nothing for %.0f s: it is not asked again", link.name, limit_s)
                self._avoided.add(start)
                self._keepers[start].cancel()

    def busy_share(self) -> float | None:
        """Share of the time since this was asked before for which a replica computed, mean over them; None where that
        is not known of any."""
        before = self._busy
        self._busy = {start: link.busy for start, link in self._links.items() if link.busy is not None}
        spans = [(then, self._busy[start]) for start, then in before.items() if start in self._busy]
        shares = [(now[1] - then[1]) / (now[0] - then[0]) for then, now in spans if now[0] > then[0]]
        return fmean(shares) if shares else None

    async def end(self, timeout_s: float) -> None:
        """Tell all that the run needs them no more. Who does not hear it ends by itself."""
        calls = [asyncio.ensure_future(link.post("end", {})) for link in self._links.values()]
        if calls:
            await asyncio.wait(calls, timeout=timeout_s)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    def _meet(self, address: ReplicaAddress) -> None:
        start = (address.replica, address.start)
        if start not in self._links and start not in self._avoided:
            link = ReplicaLink(address, self._token, self._digest, self._driver, self._timings, self._heard)
            self._links[start] = link
            self._keepers[start] = self._spawn(self._keep(start, link))

    async def _keep(self, start: Start, link: ReplicaLink) -> None:
        """Be in touch with one until it is lost."""
        try:
            await link.run()
        except ReplicaRefuses as error:
            self._avoided.add(start)
            logger.error("%s", error)
        except ReplicaGone as error:
            # What went wrong may be the network: it is met again if it answers.
            if str(error) not in self._complained:
                self._complained.add(str(error))
                logger.warning("%s", error)
        finally:
            del self._links[start], self._keepers[start]
            self._lost(link)


class Roster:
    """What is to be read of an attempt's replicas. Files may be slow: for a thread that nobody waits for."""

    def __init__(self, attempt: Attempt, digest: str) -> None:
        """digest: see `wire.digest_of`."""
        self._attempt, self._digest = attempt, digest
        self._refused: set[Start] = set()
        self._complained: set[str] = set()

    def look(self) -> Seen:
        """How it is now. What cannot be used is logged, once."""
        addresses: list[ReplicaAddress] = []
        states: list[ReplicaState | None] = []
        try:
            for replica in self._attempt.replicas():
                found = read(ReplicaAddress, replica.listener)
                if isinstance(found, Unreadable):
                    self._complain(str(found))
                elif not isinstance(found, Absent) and self._accepts(found):
                    addresses.append(found)
                states.append(if_readable(read(ReplicaState, replica.state)))
        except OSError as error:
            self._complain(f"{self._attempt.folder} cannot be listed: {error}")
        return Seen(addresses, _all_given_up(states))

    def _accepts(self, address: ReplicaAddress) -> bool:
        start = (address.replica, address.start)
        if start not in self._refused and (why := self._mismatch(address)) is not None:
            self._refused.add(start)
            logger.error("replica %d (start %d) is not asked: %s", *start, why)
        return start not in self._refused

    def _mismatch(self, address: ReplicaAddress) -> str | None:
        if address.protocol != PROTOCOL:
            return f"it speaks protocol {address.protocol}, and this rank {PROTOCOL}: they run different code"
        if address.digest != self._digest:
            return f"its configuration is {address.digest[:12]}, and that of this rank {self._digest[:12]}"
        return None

    def _complain(self, what: str) -> None:
        if what not in self._complained:
            self._complained.add(what)
            logger.warning("%s", what)


class Seen(NamedTuple):
    """The replicas of an attempt at some moment."""

    addresses: list[ReplicaAddress]
    """Of those that have come up and are of this run."""
    given_up: str | None
    """Why there will be none any more; None: there may be."""


def _all_given_up(states: list[ReplicaState | None]) -> str | None:
    known = [state for state in states if state is not None]
    if not states or len(known) < len(states) or any(state.state != REPLICA_GIVEN_UP for state in known):
        return None
    return known[0].why or "each ended too often"
