"""Deadlines of other processes, kept by a clock that nobody sets.

A record has unix times, the only ones that processes and machines share. A clock that is set hours forward or back
would end a wait at once, or never.
"""

from __future__ import annotations

import time
from typing import Callable

from megatron_rl.contract.attempt_records import Drain


class SteadyDeadline:
    """Times of this process's time.monotonic() at which the deadlines of requests to leave pass.

    A deadline is compared with the clock of this machine once, when it is first seen: a clock that is set afterwards
    does not move it. A clock that was set between the request and then, or that differs from the writer's, moves it by
    as much, but never leaves more time than the request gave.
    """

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._seen: float | None = None  # unix time
        self._at = 0.0

    def left_s(self, request: Drain | None) -> float | None:
        """Seconds until the deadline of a request passes; None if it has none."""
        now = time.monotonic()
        ends_at = self.of(request, now)
        return None if ends_at is None else ends_at - now

    def of(self, request: Drain | None, now: float) -> float | None:
        """Return when the deadline of a request passes; None if it has none. now: time.monotonic()."""
        if request is None or request.deadline is None:
            return None
        if request.deadline != self._seen:
            left_s = min(request.deadline - self._wall(), max(0.0, request.deadline - request.at))
            self._seen, self._at = request.deadline, now + left_s
        return self._at
