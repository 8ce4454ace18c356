"""Which replicas an attempt has, by what they and the host side write."""

from __future__ import annotations

import logging
from typing import NamedTuple

from megatron_rl.contract.attempt_records import ReplicaAddress, ReplicaState
from megatron_rl.contract.codes import REPLICA_GIVEN_UP
from megatron_rl.contract.paths import Attempt
from megatron_rl.contract.records import Absent, Unreadable, if_readable, read
from megatron_rl.inference.replicas.wire import PROTOCOL

logger = logging.getLogger(__name__)

Start = tuple[int, int]
"""Replica, and how often it was started before."""


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
