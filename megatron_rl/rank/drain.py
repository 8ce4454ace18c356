"""Being asked to leave: a signal, or the drain file, only sets a flag. When to act on it is the business of Pulse."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from megatron_rl.contract.paths import Attempt
from megatron_rl.run_dir import read_json, write_json

DRAIN_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)

MARGIN_S = 6.0
"""Before the deadline: the host side ends what is still there LAST_MOMENT (5 s) before it."""
FIT = 1.5
"""A save fits where this many times the last one does."""


class Drain:
    """The flag. SIGINT is ignored: Ctrl-C is the launcher's to translate."""

    def __init__(self, attempt: Attempt) -> None:
        self.asked = False
        self._attempt = attempt
        self._signal = "a request"

    def listen(self, early: Callable[[], None]) -> None:
        """From here on signals are heard, even while the main thread is inside a library that waits for other ranks.

        early: called, in a thread of its own, for a request that comes before `started`.
        """
        self._early: Callable[[], None] | None = early
        heard, written = os.pipe()
        os.set_blocking(written, False)
        for number in DRAIN_SIGNALS:
            signal.signal(number, self._request)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Python runs handlers in the main thread, between two of its own instructions; this byte is written at once.
        signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        threading.Thread(target=self._hear, args=(heard,), name="drain", daemon=True).start()
        if self._attempt.drain.exists():  # the signal came before there was anybody to hear it
            self._request(signal.SIGUSR1, None)
            os.write(written, bytes([signal.SIGUSR1]))

    def started(self) -> None:
        """From here on a request waits for the next safe point."""
        self._early = None

    def _request(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number).name
        self.asked = True

    def _hear(self, pipe: int) -> None:
        while True:
            for number in os.read(pipe, 64):
                if number in DRAIN_SIGNALS:
                    self.asked = True
                    if (early := self._early) is not None:  # `started` may be called this very moment
                        early()

    def pass_on(self, rank: int) -> None:
        """Tell the host side, where only the ranks were told. It adds what Slurm says of the deadline."""
        # Listed, not looked up: a network file system may remember that it was missing when the rank started.
        if self._attempt.drain not in self._attempt.folder.iterdir():
            by = f"{self._signal} to rank {rank}"
            write_json(self._attempt.drain, {"cause": "signal", "by": by, "at": time.time(), "deadline": None})

    def deadline(self) -> float | None:
        """Unix time at which this process will be gone; None where nobody has said so."""
        try:
            request = read_json(self._attempt.drain)
        except (OSError, ValueError):  # somebody's empty file, perhaps: that it is there is a request all the same
            return None
        said = request.get("deadline") if isinstance(request, dict) else None
        return float(said) if isinstance(said, int | float) else None


def fits(now: float, deadline: float | None, seconds: float) -> bool:
    """Whether something that took `seconds` the last time can be done again before `deadline` (unix times)."""
    return deadline is None or now + FIT * seconds <= deadline - MARGIN_S
