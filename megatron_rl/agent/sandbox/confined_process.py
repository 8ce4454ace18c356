"""One confined child process: start, exchange of data within its limits, and end."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from megatron_rl.agent.sandbox.limits import ProcessLimits

ROOT = str(Path(__file__).parents[3])
MAIN = "import sys; sys.path.append(sys.argv.pop(1)); from megatron_rl.agent.sandbox.confined_child import main; main()"
INHERITED = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL")
"""Environment variables passed to a child. None of them is secret."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

CHUNK = 2**16
COMPLAINT_BYTES = 2000
REAP_S = 10.0
"""Seconds for the kernel to end a killed process; a process that hangs in a file system may need longer."""


class OutputTooLarge(Exception):
    """A child wrote more than its limit."""


class ConfinedProcess:
    """A child process. Used by one thread at a time; it ends with the thread that created it."""

    def __init__(self, limits: ProcessLimits, function: str | None = None, path: Sequence[str] = ()) -> None:
        """Start the process.

        function: module:name that a worker answers with; None: a program is sent.
        path: directories to import modules from, besides the interpreter's own.

        Raises OSError if the process cannot be started.
        """
        job = {
            "parent": os.getpid(),
            "memory_bytes": limits.memory_bytes,
            "cpu_s": limits.cpu_s,
            "function": function,
            "path": list(path),
        }
        inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-X", "utf8", "-c", MAIN, ROOT, json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if function is None else None,
            bufsize=0,
            cwd="/",
            env=inherited | ONE_THREAD,
            start_new_session=True,
        )
        self._ending = threading.Lock()
        self._output_bytes = limits.output_bytes
        self.pid = self._process.pid
        self.complaint = b""
        self.cpu_s = 0.0
        """Seconds of processor time, once it has ended."""
        for pipe in self._pipes():
            os.set_blocking(pipe.fileno(), False)

    def ask(self, request: bytes, deadline: float) -> bytes:
        """Send a request; return the line of the answer. Raises TimeoutError, OutputTooLarge, and EOFError if the child
        ended."""
        line = self._exchange(request, deadline, to_end=False)
        if not line.endswith(b"\n"):
            raise EOFError
        return line

    def finish(self, content: bytes, deadline: float) -> bytes:
        output = self._exchange(content, deadline, to_end=True)
        if not self._reap(deadline):  # it closed its output but still runs
            raise TimeoutError
        return output

    def kill(self) -> int | None:
        """Kill the process group, from any thread. Return the exit code, negative for a signal; None if the kernel has
        not ended the process yet."""
        with self._ending:
            if self._process.returncode is None:
                os.killpg(self.pid, signal.SIGKILL)  # not reaped yet, so the number cannot belong to another process
        self._reap(time.monotonic() + REAP_S)
        return self._process.returncode

    def exit_code(self) -> int | None:
        """Return the exit code of a process that closed its output, negative for a signal. Kills it if it stays."""
        return self._process.returncode if self._reap(time.monotonic() + 1.0) else self.kill()

    def end(self) -> int | None:
        code = self.kill()
        for pipe in self._pipes():
            pipe.close()
        return code

    def _exchange(self, content: bytes, deadline: float, *, to_end: bool) -> bytes:
        """Write and read at the same time, so that neither waits for the other."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None  # pipes
        unwritten, stdin, stdout = memoryview(content), process.stdin.fileno(), process.stdout.fileno()
        reading = {stdout} if process.stderr is None else {stdout, process.stderr.fileno()}
        waiting = select.poll()  # unlike select.select it supports file numbers beyond 1023
        waiting.register(stdin, select.POLLOUT)
        for file in reading:
            waiting.register(file, select.POLLIN)
        output, size = [], 0
        while reading:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            for file, _ in waiting.poll(left_s * 1000):
                if file == stdin:
                    try:
                        unwritten = unwritten[os.write(file, unwritten[:CHUNK]) :]
                    except BrokenPipeError:
                        unwritten = unwritten[:0]  # the child does not read its input
                    if not unwritten:
                        waiting.unregister(file)
                        if to_end:
                            process.stdin.close()
                    continue
                try:
                    part = os.read(file, CHUNK)
                except BlockingIOError:
                    continue  # another process has read it, which a kernel without Landlock lets a program do
                size += len(part)
                if size > self._output_bytes:
                    raise OutputTooLarge
                if not part:
                    waiting.unregister(file)
                    reading.remove(file)
                elif file == stdout:
                    output.append(part)
                    if not to_end and b"\n" in part:
                        return b"".join(output)
                else:
                    self.complaint = (self.complaint + part)[-COMPLAINT_BYTES:]
        return b"".join(output)

    def _reap(self, deadline: float) -> bool:
        while True:
            with self._ending:
                if self._process.returncode is not None:
                    return True
                pid, status, usage = os.wait4(self.pid, os.WNOHANG)
                if pid:
                    self._process.returncode = os.waitstatus_to_exitcode(status)
                    self.cpu_s = usage.ru_utime + usage.ru_stime
                    return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.001)

    def _pipes(self) -> list[IO[bytes]]:
        found = (self._process.stdin, self._process.stdout, self._process.stderr)
        return [pipe for pipe in found if pipe is not None and not pipe.closed]
