"""Are two answers equal? math-verify says, in processes that may hang, grow or die without harm to anyone else.

    event loop -> thread -> child process (environments/math/verifier_child.py)

sympy can take for ever on a few characters such as 9^{9^{9^9}}, in code that no exception interrupts. So a child has
a limit of memory, a thread waits for its verdict with a limit of time, and kills it when that is over.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import select
import subprocess
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from queue import LifoQueue

START_S = 120.0
"""Longest start of a child: importing sympy from a busy network file system."""

LONGEST_ANSWER = 500
"""Characters up to which an answer is looked at, unless the right one is as long: a model that puts its whole text into
the box is wrong, and parsing a thousand characters takes seconds."""


class NoVerdict(Exception):
    """Two answers could not be compared."""


class Verifier:
    """Compares answers in `processes` children, which start when they are first needed and end with this object."""

    def __init__(self, processes: int, timeout_s: float, memory_gib: float) -> None:
        """Raises ValueError where math-verify is not installed."""
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError("environment math needs `pip install mrl[math]`: there is no math-verify")
        children = [_Child(timeout_s, int(memory_gib * 2**30)) for _ in range(processes)]
        self._idle: LifoQueue[_Child] = LifoQueue()  # the child used last is warm
        for child in children:
            self._idle.put(child)
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="verifier")
        self.close = weakref.finalize(self, _close, self._threads, children)
        """Ends the children; so does the end of this object or of the interpreter."""

    async def equal(self, golden: str, answer: str) -> bool:
        """Whether `answer` is mathematically the same as `golden`; the event loop goes on meanwhile.

        Raises NoVerdict where it takes too long or too much memory to say.
        """
        if golden == answer:
            return True
        if len(answer) > max(LONGEST_ANSWER, 2 * len(golden)):
            return False
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._compare, golden, answer)

    def _compare(self, golden: str, answer: str) -> bool:
        child = self._idle.get()
        try:
            return child.compare(golden, answer)
        finally:
            self._idle.put(child)


class _Child:
    """One process, started again after each death. Used by one thread at a time."""

    def __init__(self, timeout_s: float, memory: int) -> None:
        self._timeout_s = timeout_s
        self._memory = memory
        self._process: subprocess.Popen[bytes] | None = None

    def compare(self, golden: str, answer: str) -> bool:
        process = self._process or self._start()
        try:
            assert process.stdin is not None  # a pipe
            process.stdin.write(json.dumps([golden, answer]).encode() + b"\n")
            return bool(json.loads(_read_line(process, self._timeout_s)))
        except TimeoutError as error:
            self.kill()
            raise NoVerdict(f"comparing two answers took longer than {self._timeout_s:g} s") from error
        except (EOFError, BrokenPipeError) as error:
            self.kill()
            raise NoVerdict(
                "the process that compared two answers died, most likely of its limit of "
                f"{self._memory / 2**30:g} GiB (environment.args.verify_memory_gib)"
            ) from error

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()  # closes the pipes and leaves no zombie
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        # Its own clock is the second line: it also ends a child whose parent is gone.
        limits = [str(2 * self._timeout_s), str(self._memory)]
        command = [sys.executable, "-m", "megatron_rl.environments.math.verifier_child", *limits]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        try:
            _read_line(self._process, START_S)
        except (TimeoutError, EOFError) as error:
            self.kill()
            raise NoVerdict(
                f"the process that compares answers did not start within {START_S:g} s and "
                f"{self._memory / 2**30:g} GiB (environment.args.verify_memory_gib); the rank's log says more"
            ) from error
        return self._process


def _read_line(process: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    """The next line of its output. Raises TimeoutError, and EOFError where the process ended."""
    assert process.stdout is not None  # a pipe
    readable = select.poll()  # unlike select.select it takes a file number beyond 1023
    readable.register(process.stdout, select.POLLIN)
    deadline = time.monotonic() + timeout_s
    line = b""
    while not line.endswith(b"\n"):
        if not readable.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError
        part = os.read(process.stdout.fileno(), 4096)
        if not part:
            raise EOFError
        line += part
    return line


def _close(threads: ThreadPoolExecutor, children: list[_Child]) -> None:
    threads.shutdown(wait=False, cancel_futures=True)
    for child in children:
        child.kill()
