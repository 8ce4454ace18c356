"""The first process of vLLM that ends, and its signal.

When one of vLLM's processes is killed, the others end by themselves with other errors and exit codes, so the end of
`vllm serve` says little.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

SCAN_S = 2.0
ENGINE = "VLLM::"
"""Beginning of the names that vLLM gives the processes of its engine, without which it cannot continue."""
ASKED = (signal.SIGTERM, signal.SIGINT)
"""Signals that vLLM's processes send one another to end, or a user or the launcher sends to all."""

INFO = struct.Struct("2Q11Ii")
"""struct pidfd_info of Linux 6.15: mask, control group, eleven ids, exit status."""
PIDFD_INFO_EXIT = 8
PIDFD_GET_INFO = 3 << 30 | INFO.size << 16 | 0xFF << 8 | 11


@dataclass(frozen=True, slots=True)
class Death:
    name: str
    signal: signal.Signals | None
    """None: it ended by itself, or nobody knows."""
    at: float
    """time.monotonic()"""

    def __str__(self) -> str:
        if self.signal is None:
            return f"its process {self.name} ended first"
        why = ", by somebody or because memory ran out" if self.signal == signal.SIGKILL else ""
        return f"its process {self.name} was killed by {self.signal.name}{why}"


class Deaths:
    """Watches all processes under a guard, in a thread. Without pidfd (Linux 5.3) it sees none.

    `first` is the first process that was killed, or the first of the engine that ended.
    """

    def __init__(self, guard: int, scanned: Callable[[list[int]], None]) -> None:
        """
        guard: process id of the guard.
        scanned: called with the ids of all processes after each look.
        """
        self.first: Death | None = None
        self._guard, self._scanned = guard, scanned
        self._server: int | None = None  # process id of `vllm serve`, the guard's first child
        self._over = False  # whether it has ended
        self._watched: dict[int, tuple[int, str]] = {}  # pidfd -> process id, name
        self._poll = select.poll()
        self._wake, self._waker = os.pipe()
        self._poll.register(self._wake, select.POLLIN | select.POLLHUP)
        self._thread = threading.Thread(target=self._run, name="vllm-deaths", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._waker < 0:
            return
        os.close(self._waker)
        self._waker = -1
        self._thread.join()
        for descriptor in [self._wake, *self._watched]:
            os.close(descriptor)

    def _run(self) -> None:
        while True:
            self._scan()
            due = time.monotonic() + SCAN_S
            while (left := due - time.monotonic()) > 0:
                ended = [descriptor for descriptor, _ in self._poll.poll(left * 1000)]
                if self._wake in ended:
                    return
                # Once `vllm serve` has ended, its guard kills the workers that it left. These deaths explain nothing,
                # and under load one poll reports them together with the end that they follow:
                #
                #     vllm serve exits with code 1 -> guard: SIGKILL to VLLM::Worker_TP0 -> both are in `ended`
                #
                # So the server comes first, and nothing is a reason after it.
                for descriptor in sorted(ended, key=lambda each: self._watched[each][0] != self._server):
                    self._conclude(descriptor)

    def _scan(self) -> None:
        known = {process: descriptor for descriptor, (process, _) in self._watched.items()}
        living: list[psutil.Process] = []
        with suppress(psutil.Error):  # the guard has ended
            guard = psutil.Process(self._guard)
            living = guard.children(recursive=True)
            if self._server is None:
                server = min(guard.children(), key=psutil.Process.create_time, default=None)
                self._server = None if server is None else server.pid  # None: it has ended since the look above
        for process in living:
            with suppress(OSError, psutil.Error, AttributeError):  # it has ended, or there is no pidfd
                name = _name(process)  # asked again in each look: vLLM renames its processes after a while
                descriptor = known.get(process.pid)
                if descriptor is None:
                    descriptor = os.pidfd_open(process.pid)
                    self._poll.register(descriptor, select.POLLIN)
                self._watched[descriptor] = (process.pid, name)
        self._scanned([process.pid for process in living])

    def _conclude(self, descriptor: int) -> None:
        process, name = self._watched.pop(descriptor)
        number = _signal_of(process, descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        if self.first is None and not self._over and (number not in (None, *ASKED) or name.startswith(ENGINE)):
            self.first = Death(name, number, time.monotonic())
        self._over = self._over or process == self._server


def _name(process: psutil.Process) -> str:
    words = process.cmdline()
    return words[0] if words and words[0].startswith(ENGINE) else f"{process.name()} (pid {process.pid})"


def _signal_of(process: int, descriptor: int) -> signal.Signals | None:
    """Signal that ended a process. Older kernels forget it once its parent has asked for its exit status."""
    status = None
    with suppress(OSError, ValueError):
        status = int(Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace").split()[-1])
    with suppress(OSError):
        found = INFO.unpack(fcntl.ioctl(descriptor, PIDFD_GET_INFO, INFO.pack(PIDFD_INFO_EXIT, *[0] * 13)))
        status = found[-1] if found[0] & PIDFD_INFO_EXIT else status
    return signal.Signals(os.WTERMSIG(status)) if status is not None and os.WIFSIGNALED(status) else None
