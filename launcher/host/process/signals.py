"""Signals as a queue: handlers only remember them and wake the main loop."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Sequence
from types import FrameType


class Signals:
    """Queue of the signals that this process receives from now on. The end of a child ends a wait too."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._received: list[str] = []
        self._reader, self._writer = os.pipe()
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)
        for number in numbers:
            signal.signal(number, self._receive)
        signal.signal(signal.SIGCHLD, self._wake)

    def add(self, name: str) -> None:
        self._received.append(name)

    def take(self) -> list[str]:
        """Names of the signals since the last call, in their order: SIGTERM, ..."""
        taken, self._received = self._received, []
        return taken

    def wait(self, seconds: float) -> None:
        if not self._received and select.select([self._reader], [], [], seconds)[0]:
            os.read(self._reader, 65536)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self._received.append(signal.Signals(signum).name)
        self._wake(signum, frame)

    def _wake(self, signum: int, frame: FrameType | None) -> None:
        with contextlib.suppress(BlockingIOError):  # full: the waiting thread is awake
            os.write(self._writer, b".")
