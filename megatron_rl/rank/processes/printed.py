"""Output of a function and its children: divided by answer, bounded, and logged."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

PRINTED_CHARACTERS = 4000
CHUNK = 2**16


class LastBytes:
    def __init__(self, size: int) -> None:
        self._size, self._held, self._parts = size, 0, deque[bytes]()

    def add(self, part: bytes) -> None:
        self._parts.append(part)
        self._held += len(part)
        while self._held - len(self._parts[0]) >= self._size:
            self._held -= len(self._parts.popleft())

    def text(self) -> str:
        return b"".join(self._parts)[-self._size :].decode(errors="replace")


@dataclass(slots=True)
class Printed:
    """Standard output and error output of a worker, divided at its marks."""

    pattern: re.Pattern[bytes]
    ends: Callable[[int, str], None]  # called with the number of an answer and with what was printed before its mark
    tail: LastBytes = field(default_factory=lambda: LastBytes(4 * PRINTED_CHARACTERS))
    _held: bytes = b""  # possible beginning of a mark

    def add(self, part: bytes) -> None:
        self._held += part
        while found := self.pattern.search(self._held):
            self.tail.add(self._held[: found.start()])
            self._held = self._held[found.end() :]
            self.ends(int(found[1]), self.take())
        begun = self._held.rfind(b"\0")
        whole = len(self._held) if begun < 0 or len(self._held) - begun > len(self.pattern.pattern) + 20 else begun
        self.tail.add(self._held[:whole])
        self._held = self._held[whole:]

    def take(self) -> str:
        text, self.tail = self.tail.text()[-PRINTED_CHARACTERS:], LastBytes(4 * PRINTED_CHARACTERS)
        return text


class LogBudget:
    """Limit of what is logged: a function may print for every answer, and a run has millions."""

    CHARACTERS, PERIOD_S = 20_000, 60.0

    def __init__(self) -> None:
        self._until, self._left, self._withheld = 0.0, 0, 0

    def spend(self, text: str) -> str | None:
        """Return what to log of a text; None if the budget of this period is spent."""
        now = time.monotonic()
        if now >= self._until:
            self._until, self._left = now + self.PERIOD_S, self.CHARACTERS
        if self._left <= 0:
            self._withheld += 1
            return None
        self._left -= len(text)
        withheld, self._withheld = self._withheld, 0
        return f"(the output for {withheld:,} answers was not logged)\n{text}" if withheld else text
