"""Waits for events of other processes and threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(holds: Callable[[], T], what: str | Callable[[], str] = "the condition holds", limit_s: float = 60.0) -> T:
    """Wait until `holds` returns something true, and return that.

    Args:
        what: event that is awaited, for the message of a failure, or a function that returns such a message.
        limit_s: generous, since a busy machine is normal.
    """
    deadline = time.monotonic() + limit_s
    while not (found := holds()):
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what if isinstance(what, str) else what()}"
        time.sleep(0.02)
    return found
