"""The process of `vllm serve`: started, read, and ended with all that it started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import psutil

from megatron_rl.generate.vllm.deaths import Deaths
from megatron_rl.generate.vllm.private_folder import note_shared_memory
from megatron_rl.rank.processes.guard import END, code_of, guarded

PREFIX = "vllm | "
KEPT_LINES = 100
"""Last lines with an error that are kept to find the reason of an end."""
END_S = 10.0
"""Seconds from SIGTERM to SIGKILL."""
EXIT_S = 5.0
"""Seconds in which vLLM's server ends after a call of it has failed because a process of vLLM was killed."""
SHUTDOWN_S = 30.0
"""Seconds after an error in which vLLM kills its own processes."""
READ_S = 2.0
"""Seconds to read the rest of the output of a process that has ended."""

_FULL_DISK = "No space left on device"
_REASON = re.compile(
    rf"(?:\b\w*(?:Error|Exception|Interrupt)\b|\berror): .*\S|[^][]*{_FULL_DISK}|\S+ cannot be started: .*"
)
_NOT_THE_CAUSE = re.compile(
    r"initialization failed|EngineDeadError|CancelledError|RuntimeError: (?:cancelled|Executor failed)"
    r"| (?:WARNING|INFO|DEBUG) "
)
"""Lines that report the end of another process of vLLM, or no error at all."""


class VllmGone(RuntimeError):
    """vLLM has ended, or does not answer; the message says why, as far as its output does."""


class VllmClosed(VllmGone):
    """vLLM no longer listens."""


class VllmRefused(RuntimeError):
    """vLLM answers that it could not do something.

    status: of HTTP; from 500 on, the request is not to blame.
    """

    def __init__(self, message: str, status: int = 500) -> None:
        super().__init__(message)
        self.status = status


class VllmProcess:
    """`vllm serve`, whose output is passed on line by line.

    It stays in the process group of this process, which the launcher kills as a whole. Its guard ends it, and all that
    it has started, when this process ends in any other way.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: TextIO, folder: Path | None = None
    ) -> None:
        """
        log: file that its output is passed on to.
        folder: private folder in which its shared memory is noted; None: nothing is noted.
        """
        self._log, self._folder = log, folder
        self._lines: deque[tuple[float, str]] = deque(maxlen=KEPT_LINES)  # with time.monotonic()
        self._guard = subprocess.Popen(
            guarded(command, END_S),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="backslashreplace",
        )
        self._reader = threading.Thread(target=self._read, name="vllm-log", daemon=True)
        self._reader.start()
        self._deaths = Deaths(self._guard.pid, self._note_shared_memory)

    @property
    def code(self) -> int | None:
        """Exit code; None: it has not ended."""
        code = self._guard.poll()
        return None if code is None else code_of(code)

    def check(self) -> None:
        """Raise VllmClosed if it has ended."""
        if (code := self.code) is None:
            return
        self._reader.join(READ_S)
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        raise VllmClosed(self._with_reason(f"vLLM has ended ({how})"))

    def explained(self, message: str) -> str:
        """The message of a failed call, or how vLLM has ended, which says more; with the error that its output reports,
        if any."""
        with suppress(subprocess.TimeoutExpired):
            self._guard.wait(EXIT_S)
        try:
            self.check()
        except VllmGone as ended:
            return str(ended)
        return self._with_reason(message)

    def _with_reason(self, message: str) -> str:
        """Add the first death of a process, unless an error came before it; else the error, if there is one."""
        lines, death = list(self._lines), self._deaths.first
        if death is not None:
            before = [line for at, line in lines if death.at - SHUTDOWN_S < at <= death.at]
            reported = reason_in(before if death.signal else [line for _, line in lines])
            if reported is None:
                return f"{message}: {death}"
        why = reason_in([line for _, line in lines])
        return message if why is None or why in message else f"{message}: {why}"

    def _note_shared_memory(self, processes: Sequence[int]) -> None:
        with suppress(OSError):  # on a full disk they stay if all processes are killed at once
            if self._folder is not None:
                note_shared_memory(self._folder, processes)

    def end(self) -> None:
        self._deaths.close()
        with suppress(psutil.Error):
            self._note_shared_memory([each.pid for each in psutil.Process(self._guard.pid).children(recursive=True)])
        if self._guard.poll() is None:
            os.kill(self._guard.pid, END)
        self._guard.wait()
        self._reader.join(READ_S)

    def _read(self) -> None:
        assert self._guard.stdout is not None
        for line in self._guard.stdout:
            if _REASON.search(line):  # a compiler alone may write thousands of lines before the end
                self._lines.append((time.monotonic(), line.rstrip("\n")))
            print(PREFIX + line, end="", file=self._log, flush=True)


def reason_in(lines: Sequence[str]) -> str | None:
    """Return the error that most likely ended vLLM, from the last lines of its output.

    When a worker fails, vLLM's other processes report their own failures after it. So do the programs that it started,
    after a full disk.
    """
    found = [match[0].strip() for line in lines if (match := _REASON.search(line)) and not _NOT_THE_CAUSE.search(line)]
    found = [reason for reason in found if _FULL_DISK in reason] or found
    return found[-1][:500] if found else None
