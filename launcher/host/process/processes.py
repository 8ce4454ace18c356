"""Identity of a process across pid reuse, and children that leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Callable

from megatron_rl.contract.children import death_with_parent

KILLED_S = 60.0  # seconds to wait for a killed process: freeing hundreds of gigabytes takes a while


def start_time(pid: int) -> int | None:
    """Start of a process in clock ticks since boot; None when it is gone or a zombie. Pids are reused, but a pid and
    its start time together identify a process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name in parentheses may contain anything
    return None if fields[0] in "ZX" else int(fields[19])


class Child:
    """A child in a session of its own, which signals from a terminal or to our process group do not reach.

    It is reaped only by `close`: until then its pid, which is also its process group, cannot be reused, and `close` can
    safely kill all that the child itself started.
    """

    def __init__(
        self,
        command: list[str],
        env: dict[str, str],
        output: str | None = None,
        errors: str | None = None,
        folder: str | None = None,
        inherited: Sequence[int] = (),
        ends_with_us: int | None = None,
    ) -> None:
        """
        Args:
            output: file that its output is appended to; default: this process's output.
            errors: file that its standard error is appended to; default: the file of `output`.
            folder: working directory; default: this process's.
            inherited: descriptors that it keeps open, such as that of a lock.
            ends_with_us: signal that it gets when this process ends first.

        Raises:
            OSError: it could not be started.
        """
        self._code: int | None = None
        descriptors: list[int] = []
        try:
            files = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) for path in (output, errors) if path]
            descriptors += files
            self._process = subprocess.Popen(
                command,
                env=env,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=files[0] if output else None,
                stderr=files[-1] if errors else subprocess.STDOUT if output else None,
                start_new_session=True,
                pass_fds=inherited,
                preexec_fn=None if ends_with_us is None else death_with_parent(os.getpid(), ends_with_us),
            )
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """Exit code, negative for the signal that ended it; None while it runs."""
        if self._code is None:
            status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is not None:
                ended_itself = status.si_code == os.CLD_EXITED
                self._code = status.si_status if ended_itself else -status.si_status
        return self._code

    def send(self, signum: int) -> None:
        """Signal the child alone; a no-op once it has ended."""
        os.kill(self.pid, signum)

    def close(self) -> None:
        """Kill the child and its process group, and reap it. A child that hangs in the kernel is left behind."""
        self.exit_code()
        with contextlib.suppress(ProcessLookupError):  # between fork and setsid there is no group yet
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()
        try:
            self._process.wait(timeout=KILLED_S)
        except subprocess.TimeoutExpired:
            print(f"process {self.pid} does not end although it was killed", file=sys.stderr)


class Fork:
    """A forked child that runs a Python function which may hang, without starting another interpreter."""

    def __init__(self, work: Callable[[], str]) -> None:
        """
        Args:
            work: returns text; what it raises becomes text too. SIGTERM ends it through every `finally`.
        """
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
        """Whether the work is done, or failed."""
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
        """Result of the work, or why it failed."""
        return self._output.decode("utf-8", "replace")

    @property
    def failed(self) -> bool:
        """Whether it ended without a result."""
        return self._status is not None and self._status != 0

    def end(self, patience: float = 0.0) -> None:
        """End the work. A child that hangs in the kernel is left behind.

        Args:
            patience: seconds for its `finally` blocks.
        """
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
    """Run the work of a Fork in the child, which ends here."""
    code = 1
    try:
        for signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)  # the parent handles them
        signal.signal(signal.SIGTERM, _raise_exit)
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


def _raise_exit(signum: int, frame: object) -> None:
    raise SystemExit(128 + signum)
