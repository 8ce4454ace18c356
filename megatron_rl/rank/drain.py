"""Requests to leave: a signal or the drain file only sets a flag. SafePoints decides when to act on it."""

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
from megatron_rl.contract.files import names_in
from megatron_rl.contract.paths import RankFiles
from megatron_rl.contract.records import if_readable, read, write
from megatron_rl.contract.steady import SteadyDeadline

logger = logging.getLogger(__name__)

DRAIN_SIGNALS = (DRAIN_SIGNAL, signal.SIGUSR2, signal.SIGTERM)
"""The host side's signal, and those sent by Slurm and people."""
FIT = 1.5  # a save must fit this many times into the remaining time, by the duration of the last one


class DrainListener:
    """Holder of the flag `asked`, which signals set. Ignores SIGINT: the launcher handles Ctrl-C."""

    def __init__(self, files: RankFiles, *, notifies_host: bool = True) -> None:
        """notifies_host: whether a request to ranks of this world alone makes the whole attempt leave."""
        self.asked = False
        self._files, self._notifies_host = files, notifies_host
        self._signal, self._steady = "a request", SteadyDeadline()

    def listen(self, early: Callable[[], object]) -> None:
        """Notice signals from here on, even while the main thread waits for other ranks inside a library.

        early: called in a separate thread for a request before `started`.
        """
        self._early: Callable[[], object] | None = early
        request_pipe, written = os.pipe()
        os.set_blocking(written, False)
        for number in DRAIN_SIGNALS:
            signal.signal(number, self._request)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Python runs handlers in the main thread between bytecode instructions; this byte is written at once.
        signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        threading.Thread(target=self._read_requests, args=(request_pipe,), name="drain", daemon=True).start()
        if self._files.drain.exists():  # the signal came before this process could receive it
            self._request(DRAIN_SIGNAL, None)
            os.write(written, bytes([DRAIN_SIGNAL]))

    def started(self, then: Callable[[], object] | None = None) -> None:
        """Defer requests to the next safe point from here on.

        then: called in a separate thread for each request from now on, and at once if there was one.
        """
        self._early = then
        if then is not None and self.asked:
            then()

    def _request(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number).name
        self.asked = True

    def _read_requests(self, pipe: int) -> None:
        while True:
            for number in os.read(pipe, 64):
                if number in DRAIN_SIGNALS:
                    self._request(number, None)  # the handler may run long after this
                    if (early := self._early) is not None:  # `started` may be called at this moment
                        early()

    def notify_host(self, rank: int) -> None:
        """Write the drain file if only the training ranks were asked. The host side adds Slurm's deadline.

        The ranks leave even if the file cannot be written: their outcome carries the same information.
        """
        if not self._notifies_host:
            return
        try:
            # List the folder: a network file system may remember that the file was missing when the rank started.
            if self._files.drain.name not in names_in(self._files.folder):
                by = f"{self._signal} to rank {rank}"
                write(self._files.drain, Drain(SIGNALLED, by, time.time()))
        except OSError as error:
            logger.warning("the host side cannot be notified that the ranks were asked to leave: %s", error)

    def left_s(self) -> float | None:
        """Seconds until this process will be killed; None if unknown. A drain file that cannot be read is a request
        without a deadline."""
        return self._steady.left_s(if_readable(read(Drain, self._files.drain)))


def leave_early(files: RankFiles, rank: int, drain: DrainListener) -> None:
    """Prepare a rank that has nothing to save for EXIT_DRAINED: rank 0 writes the outcome, the others wait for it.
    Needs no collective, as each rank was asked."""
    if rank == 0:
        drain.notify_host(rank)
        write(files.outcome, Outcome(DRAINED), patience=OUTCOME_PATIENCE_S)
    give_up = time.monotonic() + OUTCOME_PATIENCE_S
    while files.outcome.name not in names_in(files.folder) and time.monotonic() < give_up:
        time.sleep(0.1)


def fits(left_s: float | None, seconds: float) -> bool:
    """Whether a task that took `seconds` last time can be repeated in the `left_s` seconds until the deadline."""
    return left_s is None or FIT * seconds <= left_s - MARGIN_S
