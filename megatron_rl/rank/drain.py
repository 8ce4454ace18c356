"""Being asked to leave: a signal, or the drain file, only sets a flag. When to act on it is for SafePoints."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from megatron_rl.contract.attempt_records import Drain, Outcome
from megatron_rl.contract.codes import DRAIN_SIGNAL, DRAINED, MARGIN_S, OUTCOME_PATIENCE_S, SIGNALLED
from megatron_rl.contract.files import names_in, once_there_is_room
from megatron_rl.contract.paths import RankFiles
from megatron_rl.contract.records import if_readable, read, write

logger = logging.getLogger(__name__)

HEARD = (DRAIN_SIGNAL, signal.SIGUSR2, signal.SIGTERM)
"""The host side's signal, and those that Slurm and people send."""
FIT = 1.5
"""A save fits where this many times the last one does."""


class DrainListener:
    """The flag `asked`, which signals set. SIGINT is ignored: Ctrl-C is the launcher's to translate."""

    def __init__(self, files: RankFiles, *, tells_host: bool = True) -> None:
        """tells_host: whether all of the attempt leaves where only ranks of this world were asked to."""
        self.asked = False
        self._files, self._tells_host = files, tells_host
        self._signal = "a request"

    def listen(self, early: Callable[[], None]) -> None:
        """Notice signals from here on, even while the main thread is inside a library that waits for other ranks.

        early: called, in a thread of its own, for a request that comes before `started`.
        """
        self._early: Callable[[], None] | None = early
        heard, written = os.pipe()
        os.set_blocking(written, False)
        for number in HEARD:
            signal.signal(number, self._request)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Python runs handlers in the main thread, between two of its own instructions; this byte is written at once.
        signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        threading.Thread(target=self._hear, args=(heard,), name="drain", daemon=True).start()
        if self._files.drain.exists():  # the signal came before there was anybody to hear it
            self._request(DRAIN_SIGNAL, None)
            os.write(written, bytes([DRAIN_SIGNAL]))

    def started(self) -> None:
        """Have a request wait for the next safe point from here on."""
        self._early = None

    def _request(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number).name
        self.asked = True

    def _hear(self, pipe: int) -> None:
        while True:
            for number in os.read(pipe, 64):
                if number in HEARD:
                    self._request(number, None)  # the handler may run long after this
                    if (early := self._early) is not None:  # `started` may be called this very moment
                        early()

    def tell_host(self, rank: int) -> None:
        """Write the drain file where only the ranks that train were asked. The host side adds what Slurm says
        of the deadline.

        Where the file cannot be written now, the ranks leave all the same: their outcome says so too.
        """
        if not self._tells_host:
            return
        try:
            # Listed, not looked up: a network file system may remember that it was missing when the rank started.
            if self._files.drain.name not in names_in(self._files.folder):
                by = f"{self._signal} to rank {rank}"
                write(self._files.drain, Drain(SIGNALLED, by, time.time()))
        except OSError as error:
            logger.warning("the host side cannot be told that the ranks were asked to leave: %s", error)

    def deadline(self) -> float | None:
        """Unix time at which this process will be gone; None where nobody has said so, or nobody can read it now: that
        the file is there is a request all the same."""
        request = if_readable(read(Drain, self._files.drain))
        return None if request is None else request.deadline


def leave_early(files: RankFiles, rank: int, drain: DrainListener) -> None:
    """Bring about, before there is anything to save, that this rank may end with EXIT_DRAINED: rank 0 writes the
    outcome, the others wait for it. Needs no other rank: each was asked."""
    if rank == 0:
        drain.tell_host(rank)
        once_there_is_room(files.outcome, lambda: write(files.outcome, Outcome(DRAINED)), OUTCOME_PATIENCE_S)
    give_up = time.monotonic() + OUTCOME_PATIENCE_S
    while files.outcome.name not in names_in(files.folder) and time.monotonic() < give_up:
        time.sleep(0.1)


def fits(now: float, deadline: float | None, seconds: float) -> bool:
    """Whether something that took `seconds` the last time can be done again before `deadline` (unix times)."""
    return deadline is None or now + FIT * seconds <= deadline - MARGIN_S
