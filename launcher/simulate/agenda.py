"""What is going to happen, in the order of time."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Act = Callable[[float], None]
"""Called with the moment at which it happens."""


class Agenda:
    """Events to come. Of two at the same moment the one that was put down first happens first."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, Act]] = []
        self._put_down = 0

    def at(self, moment: float, act: Act) -> None:
        """Put an event down."""
        self._put_down += 1
        heapq.heappush(self._events, (moment, self._put_down, act))

    def clear(self) -> None:
        """Nothing of it will happen."""
        self._events.clear()

    def go_on(self) -> None:
        """Let the next event happen."""
        moment, _, act = heapq.heappop(self._events)
        act(moment)
