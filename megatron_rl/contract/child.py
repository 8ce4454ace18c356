"""A child process beside this one, which leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Union

from megatron_rl.contract.children import death_with_parent

KILLED_S = 60.0  # seconds to wait for a killed process: freeing hundreds of gigabytes takes a while
LOOK_S = 0.01  # seconds between looks for its end

Output = Union[str, Path, BinaryIO]


class Child:
    """A child that leads a session, which signals from a terminal or to our process group do not reach.

    It is reaped only by `close`: until then its pid, which is also its process group, cannot be reused, and `close` can
    safely kill all that the child itself started.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        output: Output | None = None,
        errors: Output | None = None,
        folder: str | None = None,
        inherited: Sequence[int] = (),
        ends_with_us: int | None = None,
    ) -> None:
        """
        Args:
            env: its environment; default: this process's.
            output: file that its output is appended to; default: this process's output.
            errors: file that its standard error is appended to; default: the file of `output`.
            folder: working directory; default: this process's.
            inherited: descriptors that it keeps open, such as that of a lock.
            ends_with_us: signal that it gets when this process ends first.

        Raises:
            OSError: it could not be started.
        """
        self._code: int | None = None
        with contextlib.ExitStack() as opened:
            files = [_descriptor(file, opened) for file in (output, errors) if file]
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

    def wait(self, seconds: float) -> int | None:
        """Wait at most `seconds` for its end. Returns its exit code; None if it still runs."""
        give_up = time.monotonic() + seconds
        while self.exit_code() is None and time.monotonic() < give_up:
            time.sleep(LOOK_S)
        return self._code

    def send(self, signum: int) -> None:
        """Signal the child alone; a no-op once it has ended."""
        os.kill(self.pid, signum)

    def close(self, limit_s: float = KILLED_S) -> None:
        """Kill the child and its process group, and reap it. A child that hangs in the kernel for longer than `limit_s`
        is left behind."""
        if self._process.returncode is not None:  # closed before
            return
        self.exit_code()
        with contextlib.suppress(ProcessLookupError):  # between fork and setsid the group does not exist yet
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()
        try:
            self._code = self._process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            sys.stderr.write(f"process {self.pid} does not end although it was killed\n")


def _descriptor(file: Output, opened: contextlib.ExitStack) -> int:
    if not isinstance(file, (str, Path)):
        return file.fileno()
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    opened.callback(os.close, descriptor)
    return descriptor
