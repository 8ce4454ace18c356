"""Signals that are remembered instead of obeyed at once, and that wake whoever waits."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Sequence
from types import FrameType


class Signals:
    """The signals that this process gets from here on, in their order. The end of a child wakes a wait too."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._heard: list[str] = []
        self._reader, self._writer = os.pipe()
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)
        for number in numbers:
            signal.signal(number, self._hear)
        signal.signal(signal.SIGCHLD, self._wake)

    def add(self, name: str) -> None:
        """Remember a signal that came before there was this object."""
        self._heard.append(name)

    def take(self) -> list[str]:
        """The names of those that came since this was asked before: SIGTERM, ..."""
        taken, self._heard = self._heard, []
        return taken

    def wait(self, seconds: float) -> None:
        """Sleep, until a signal comes or a child ends."""
        if not self._heard and select.select([self._reader], [], [], seconds)[0]:
            os.read(self._reader, 65536)

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        self._heard.append(signal.Signals(signum).name)
        self._wake(signum, frame)

    def _wake(self, signum: int, frame: FrameType | None) -> None:
        with contextlib.suppress(BlockingIOError):  # full: the waiting thread is awake
            os.write(self._writer, b".")
