"""Supervision of one run of a program, in a separate process.

It starts the program in a new session and its own working directory, reads its output, and ends it when it exceeds
its limit or when the connection to the rank closes. All processes that the program leaves behind become children of the
supervisor, which ends them before it reports.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megatron_rl.contract.children import adopt_orphans, collect, end_descendants
from megatron_rl.environments.program.launch import be_program
from megatron_rl.environments.program.nursery_wire import ENDING_BYTES, OUTPUT_CHARACTERS, ProgramEnd, ProgramJob
from megatron_rl.environments.program.prepared import PreparedProgram
from megatron_rl.processes.printed import LastBytes

END_S = 5.0
"""Seconds for the kernel to end killed processes; one that hangs in a file system may need longer."""
CHUNK = 2**16


class ProgramRun:
    def __init__(self, job: ProgramJob, program: PreparedProgram, private: Sequence[int]) -> None:
        """Start the program.

        private: open files that it must not inherit.
        """
        self.code: int | None = None
        self._folder = tempfile.mkdtemp(dir=program.folder)
        try:
            for name, content in program.files.items():
                file = Path(self._folder, name)
                file.write_bytes(content)
                file.chmod(0o700)
        except OSError:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._ending, self._output, self._report = (
            LastBytes(ENDING_BYTES),
            LastBytes(4 * OUTPUT_CHARACTERS),
            LastBytes(ENDING_BYTES),
        )
        output, errors, report = os.pipe(), os.pipe(), os.pipe()
        supervisor = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            for file_number in (*private, output[0], errors[0], report[0]):
                os.close(file_number)
            be_program(job, program, Path(self._folder), supervisor, (output[1], errors[1]), report[1])
        for readable, writable in (output, errors, report):
            os.close(writable)
            os.set_blocking(readable, False)
        self.pipes: dict[int, tuple[LastBytes, ...]] = {
            output[0]: (self._ending, self._output),
            errors[0]: (self._output,),
            report[0]: (self._report,),
        }
        """Pipes that are still open, with what is kept of each."""

    def read(self, pipe: int) -> bool:
        """Read a part of what a pipe holds; return whether it may hold more. A pipe that has ended is closed."""
        try:
            part = os.read(pipe, CHUNK)
        except BlockingIOError:
            return False
        for tail in self.pipes[pipe] if part else ():
            tail.add(part)
        if not part:
            os.close(pipe)
            del self.pipes[pipe]
        return bool(part)

    def reap(self) -> None:
        """Collect ended children, the program among them."""
        if (code := collect(self.pid)) is not None:
            self.code = code

    def ask_to_end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGTERM)

    def end_all(self) -> None:
        """Kill the program and all that it has started, and delete its working directory."""
        end_descendants(END_S, self.reap)
        shutil.rmtree(self._folder, ignore_errors=True)

    def ended(self, over_limit: bool) -> ProgramEnd:
        """Return the report, with the rest of the output."""
        for pipe in list(self.pipes):
            while self.read(pipe):
                pass
        code = -signal.SIGKILL if self.code is None else self.code
        output = self._output.text()[-OUTPUT_CHARACTERS:]
        return ProgramEnd(code, over_limit, self._ending.text(), output, **json.loads(self._report.text() or "{}"))


def supervise(connection: socket.socket, program: PreparedProgram) -> None:
    """Receive a job, run the program, and report its end."""
    adopt_orphans()
    with connection.makefile("rb") as arriving:
        job = ProgramJob(*json.loads(arriving.readline()))
    wakes, woken = os.pipe()  # written to when a child ends
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    deadline = time.monotonic() + job.limit_s
    try:
        run = ProgramRun(job, program, private=(connection.fileno(), wakes, woken))
    except OSError as error:  # such as a full disk
        ended = ProgramEnd(1, unstarted=f"{error.filename or program.folder}: {error.strerror or error}")
        connection.sendall(json.dumps(ended).encode())
        return
    over_limit = abandoned = stopping = False
    try:
        with selectors.DefaultSelector() as waiting:
            for file in (connection.fileno(), wakes, *run.pipes):
                waiting.register(file, selectors.EVENT_READ)
            while run.code is None:
                for key, _ in waiting.select(max(0.0, deadline - time.monotonic())):
                    if key.fd == wakes:
                        os.read(wakes, CHUNK)
                        run.reap()
                    elif key.fd == connection.fileno():
                        abandoned = True
                        waiting.unregister(connection.fileno())
                    else:
                        run.read(key.fd)
                        if key.fd not in run.pipes:
                            waiting.unregister(key.fd)
                late = time.monotonic() >= deadline
                if stopping and late:
                    break
                if not stopping and (late or abandoned):
                    stopping, over_limit, deadline = True, late, time.monotonic() + job.grace_s
                    run.ask_to_end()
    finally:
        run.end_all()
    if not abandoned:
        with suppress(OSError):
            connection.sendall(json.dumps(run.ended(over_limit)).encode())
