"""Identity of a process across pid reuse, and forks that may hang."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Callable

from megatron_rl.contract.children import death_with_parent


def start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of a process; None when it is gone or a zombie. Pids are reused, but a pid and
    its start time together identify a process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name in parentheses may contain anything
    return None if fields[0] in "ZX" else int(fields[19])


class ForkedChild:
    """A forked child that runs a Python function which may hang, without starting another interpreter."""

    def __init__(self, work: Callable[[], str]) -> None:
        """Start the work. It returns text; what it raises becomes text too. SIGTERM ends it through every `finally`."""
        reader, writer = os.pipe()
        die_too = death_with_parent(os.getpid(), signal.SIGTERM)
        self.pid = os.fork()
        if self.pid == 0:
            _do(work, writer, die_too)
        os.close(writer)
        self._reader: int | None = reader
        self._output = b""
        self._status: int | None = None

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for the end of the work. Returns whether it has ended."""
        give_up = time.monotonic() + seconds
        while not self.has_ended():
            left = give_up - time.monotonic()
            if left <= 0 or self._reader is None:
                return self._status is not None
            select.select([self._reader], [], [], left)
        return True

    def has_ended(self) -> bool:
        while self._reader is not None and select.select([self._reader], [], [], 0)[0]:
            data = os.read(self._reader, 65536)
            self._output += data
            if not data:
                os.close(self._reader)
                self._reader = None
        if self._reader is None and self._status is None:
            self._status = os.waitpid(self.pid, 0)[1]
        return self._status is not None

    @property
    def text(self) -> str:
        return self._output.decode("utf-8", "replace")

    @property
    def failed(self) -> bool:
        return self._status is not None and self._status != 0

    def end(self, patience: float = 0.0) -> None:
        """End the work, after `patience` seconds for its `finally` blocks. One hung in the kernel is left behind."""
        if not self.has_ended() and patience > 0:
            os.kill(self.pid, signal.SIGTERM)
            self.wait(patience)
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, os.WNOHANG)
            self._status = -signal.SIGKILL
        if self._reader is not None:
            os.close(self._reader)
            self._reader = None


def _do(work: Callable[[], str], writer: int, die_too: Callable[[], None]) -> None:
    code = 1
    try:
        for signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)  # the parent handles them
        signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
        die_too()
        os.write(writer, work().encode("utf-8"))
        code = 0
    except OSError as error:
        os.write(writer, str(error.strerror or error).encode("utf-8"))
    except SystemExit:
        pass
    except BaseException:  # noqa: BLE001 - a forked child must not return into the caller's code
        os.write(writer, traceback.format_exc(limit=-3).encode("utf-8", "replace"))
    finally:
        os._exit(code)
