"""Pools of child processes for use from an event loop.

    event loop -> thread -> child process

Code in a child may never return, in a place that no exception interrupts. So a thread waits for the answer with a time
limit, and kills the process when it expires.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import LifoQueue
from typing import Any

from megatron_rl.agent.sandbox.confined_child import LENGTH_DIGITS, OUT_OF_MEMORY
from megatron_rl.agent.sandbox.confined_process import ConfinedProcess, OutputTooLarge
from megatron_rl.agent.sandbox.limits import Ending, ProcessLimits, ProcessResult
from megatron_rl.contract.bounded_json import bounded_json
from megatron_rl.contract.children import how_ended

logger = logging.getLogger(__name__)

Reader = Callable[[bytes], ProcessResult]

START_S = 120.0
"""Seconds a worker may take to start: it imports from a possibly busy network file system."""


class WorkerPool:
    """Workers that answer requests with a function of ours, on inputs that may make it hang, grow or crash. Workers
    start on first use, restart after each death, and end with this object."""

    def __init__(self, function: str, workers: int, limits: ProcessLimits) -> None:
        """function: module:name of a function from a request to its answer, both JSON values."""
        all_workers = [_Worker(function, limits) for _ in range(workers)]
        self._idle: LifoQueue[_Worker] = LifoQueue()  # reuse the latest worker, which is warm
        for worker in all_workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="sandbox")
        self.close = weakref.finalize(self, _close, self._threads, all_workers)
        """End the workers. They also end with this object and with the interpreter."""

    async def ask(self, request: Any) -> ProcessResult:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, request)

    def _ask(self, request: Any) -> ProcessResult:
        worker = self._idle.get()
        try:
            return worker.ask(request)
        finally:
            self._idle.put(worker)


class _Worker:
    """One process, restarted after each death. Used by one thread at a time."""

    def __init__(self, function: str, limits: ProcessLimits) -> None:
        self._function, self._limits = function, limits
        self.process: ConfinedProcess | None = None

    def ask(self, request: Any) -> ProcessResult:
        if self.process is None and (why := self._start()):
            return ProcessResult(Ending.KILLED, detail=why)
        assert self.process is not None
        try:
            line = self.process.ask(json.dumps(request).encode() + b"\n", time.monotonic() + self._limits.wall_s)
            outcome = _read(line)
        except TimeoutError:
            outcome = ProcessResult(Ending.TIME_OUT, detail=f"no answer within {self._limits.wall_s:g} s")
        except OutputTooLarge:
            outcome = ProcessResult(Ending.WRONG_FORMAT, detail=f"more than {self._limits.output_bytes} bytes")
        except EOFError:
            outcome = self._why_it_died()
        if outcome.ending not in (Ending.OK, Ending.ERROR):
            self.end()
        return outcome

    def _why_it_died(self) -> ProcessResult:
        assert self.process is not None
        code = self.process.exit_code()
        self.end()
        if code == -signal.SIGXCPU:
            return ProcessResult(Ending.CPU_LIMIT, detail=f"more than {self._limits.cpu_s} s")
        if code == OUT_OF_MEMORY:
            return ProcessResult(Ending.MEMORY_LIMIT, detail=f"more than {self._limits.memory_bytes / 2**30:g} GiB")
        return ProcessResult(Ending.KILLED, detail=f"it died ({_describe_exit(code)})")

    def kill(self) -> None:
        if process := self.process:
            process.kill()

    def end(self) -> None:
        if self.process is not None:
            self.process.end()
            self.process = None

    def _start(self) -> str | None:
        limit = f"within {START_S:g} s and {self._limits.memory_bytes / 2**30:g} GiB"
        try:
            self.process = ConfinedProcess(self._limits, self._function, sys.path)
            ready = json.loads(self.process.ask(b"", time.monotonic() + START_S))
        except (OSError, TimeoutError, EOFError, OutputTooLarge, ValueError) as error:
            self.end()
            return f"it did not start {limit}{f': {error}' if str(error) else '; the log says more'}"
        _warn_once(ready[1])
        return None


class ProgramPool:
    """Runs programs that a model wrote, each in its own process, up to `processes` at a time."""

    def __init__(self, processes: int) -> None:
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="sandbox")
        running: set[ConfinedProcess] = set()
        self._running = running
        self.close = weakref.finalize(self, _close, self._threads, running)

    async def run(self, source: str, standard_input: str, limits: ProcessLimits) -> ProcessResult:
        return await self._run({"source": source, "name": None}, standard_input, limits, _as_text)

    async def call(self, source: str, name: str, arguments: list[Any], limits: ProcessLimits) -> ProcessResult:
        """Call a function of a program, or a method of its class Solution; return its result as JSON."""
        return await self._run({"source": source, "name": name, "arguments": arguments}, "", limits, _read)

    async def _run(self, program: dict[str, Any], content: str, limits: ProcessLimits, read: Reader) -> ProcessResult:
        job = json.dumps(program).encode()
        whole = b"".join((str(len(job)).zfill(LENGTH_DIGITS).encode(), job, content.encode(errors="surrogatepass")))
        started: list[ConfinedProcess] = []
        work = partial(_run_program, whole, limits, read, self._running, started)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except asyncio.CancelledError:
            for process in started:  # otherwise the interpreter's exit would wait for the abandoned program
                process.kill()
            raise


def _run_program(
    whole: bytes, limits: ProcessLimits, read: Reader, running: set[ConfinedProcess], started: list[ConfinedProcess]
) -> ProcessResult:
    """Run one program. The process is appended to `started`, so that cancellation can kill it."""
    try:
        process = ConfinedProcess(limits, path=[place for place in sys.path if place.endswith("-packages")])
    except OSError as error:
        return ProcessResult(Ending.KILLED, detail=f"it could not be started: {error}")
    started.append(process)
    running.add(process)
    try:
        output = process.finish(whole, time.monotonic() + limits.wall_s)
    except TimeoutError:
        return ProcessResult(Ending.TIME_OUT, detail=f"more than {limits.wall_s:g} s")
    except OutputTooLarge:
        return ProcessResult(Ending.WRONG_FORMAT, detail=f"more than {limits.output_bytes} bytes")
    finally:
        code = process.end()
        running.discard(process)
    ready, begun, output = output.partition(b"\n")
    if not begun:
        return ProcessResult(
            Ending.KILLED, detail=f"it could not begin: {_last_line(process.complaint) or _describe_exit(code)}"
        )
    _warn_once(json.loads(ready)[1])
    if code == 0:
        return read(output)
    if code == -signal.SIGXCPU or process.cpu_s > limits.cpu_s:
        return ProcessResult(Ending.TIME_OUT, detail=f"more than {limits.cpu_s} s of processor time")
    if code in (None, -signal.SIGKILL):  # not by our limits: probably by the kernel, out of memory
        return ProcessResult(Ending.KILLED, detail=_describe_exit(code))
    return ProcessResult(Ending.ERROR, detail=_last_line(process.complaint) or _describe_exit(code))


def _as_text(output: bytes) -> ProcessResult:
    return ProcessResult(Ending.OK, output.decode(errors="replace"))


def _read(line: bytes) -> ProcessResult:
    try:
        ending, content = bounded_json(line)
        ending = Ending(ending)
    except (ValueError, TypeError):
        return ProcessResult(Ending.WRONG_FORMAT, detail="its answer cannot be parsed")
    if ending not in (Ending.OK, Ending.ERROR, Ending.WRONG_FORMAT):  # a program may write anything
        return ProcessResult(Ending.WRONG_FORMAT, detail=f"it reports {ending}")
    return ProcessResult(ending, content) if ending is Ending.OK else ProcessResult(ending, detail=str(content)[:200])


def _last_line(text: bytes) -> str:
    lines = text.decode(errors="replace").split("\n")
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")


def _describe_exit(code: int | None) -> str:
    return "the kernel has not ended it" if code is None else how_ended(code)


_warned = threading.Event()


def _warn_once(missing: str | None) -> None:
    if missing and not _warned.is_set():
        _warned.set()
        logger.warning("this machine's kernel cannot deny to programs of a model: %s", missing)


def _close(threads: ThreadPoolExecutor, running: Iterable[_Worker | ConfinedProcess]) -> None:
    threads.shutdown(wait=False, cancel_futures=True)
    for process in list(running):
        process.kill()
