"""The member with the smallest key, kept up to date in O(log members). Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Generic, TypeVar

Member = TypeVar("Member", bound=Hashable)

SPARE = 64
"""Outdated entries that stay in a heap, besides one for each member."""


class Ranking(Generic[Member]):
    """Members by their keys. The one that was added first comes before its equals."""

    # A key may grow at any time without notice, for each member has an entry whose key is at most its present one. An
    # entry whose key has grown is put right when it reaches the top:
    #
    #     entries   a 3, b 5       present keys   a 9, b 5        the top, a 3, becomes a 9; then b is first

    def __init__(self, key: Callable[[Member], Any]) -> None:
        """key: returns the present key of a member; keys are ordered."""
        self._key = key
        self._heap: list[tuple[Any, int, Member]] = []
        self._entries: dict[Member, tuple[Any, int, Member]] = {}
        self._numbers = itertools.count()

    def add(self, member: Member) -> None:
        self._enter((self._key(member), next(self._numbers), member))

    def note(self, member: Member) -> None:
        """Take notice that the key of a member may be smaller than before. No-op for others."""
        if (known := self._entries.get(member)) is not None and (key := self._key(member)) < known[0]:
            self._enter((key, known[1], member))

    def _enter(self, entry: tuple[Any, int, Member]) -> None:
        self._entries[entry[2]] = entry
        heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + SPARE:
            self._heap = [*self._entries.values()]
            heapify(self._heap)

    def discard(self, member: Member) -> None:
        self._entries.pop(member, None)

    def first(self) -> Member | None:
        """None without members."""
        while self._heap:
            entry = self._heap[0]
            key, number, member = entry
            if self._entries.get(member) is not entry:
                heappop(self._heap)
            elif (present := self._key(member)) != key:
                self._entries[member] = grown = (present, number, member)
                heapreplace(self._heap, grown)
            else:
                return member
        return None
