"""The process of worker.py: started, asked, and ended with all that it started."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil

from megatron_rl.contract.children import adopt_orphans, death_with_parent
from megatron_rl.environments.vf.config import VERSIONS
from megatron_rl.environments.vf.worker import END_S, LONGEST_LINE

MARK = "MRL_VERIFIERS_WORKER"
"""Variable that marks the processes of one worker, such as servers of tools, also those whose parent has ended."""
START_S = 600.0
"""Seconds to load the environment and its tasks, which may come from the hub or a slow file system."""
CANCEL_S = 60.0
"""Seconds in which a worker must give up a rollout that is cancelled. One that does not is stuck, and is ended."""
CLOSED_S = 1.0
"""Seconds until a worker that has closed its output, and so cannot answer any more, is killed."""
WORKER = Path(__file__).with_name("worker.py")


class WorkerGone(Exception):
    """The worker cannot be started, or has ended; the message says why."""


def list_tasks(python: str | None, environments: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the prompts of the tasks of each environment, from a worker that ends then.

    environments: what `worker.Loaded` needs, by name.

    Raises ValueError if the environments cannot be loaded.
    """
    request = json.dumps({"environments": environments, "prompts": True}) + "\n"
    command = _command(python)
    try:
        done = subprocess.run(
            command,
            input=request.encode(),
            stdout=subprocess.PIPE,
            env=_environment(uuid4().hex),
            timeout=START_S,
            preexec_fn=death_with_parent(os.getpid()),
            check=False,
        )
    except OSError as error:
        raise ValueError(f"environment.args.python: {command[0]} cannot be started: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"verifiers has not loaded the environment within {START_S:g} s") from error
    try:
        prompts: dict[str, list[str]] = _greeting(done.stdout, command[0])["prompts"]
    except WorkerGone as error:
        raise ValueError(str(error)) from error
    return prompts


class Worker:
    """A worker that is started when it is first asked, and again after its death. For one event loop."""

    def __init__(self, python: str | None, environments: Mapping[str, Any]) -> None:
        """environments: what `worker.Loaded` needs, by name."""
        self._python, self._environments = python, environments
        self._starting = asyncio.Lock()
        self._process: _Process | None = None

    async def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outcome of a rollout. Cancellation ends the rollout in the worker too.

        Raises WorkerGone if the worker cannot be started, or ends before the rollout does.
        """
        async with self._starting:
            if self._process is None or self._process.ended:
                await self.close()
                self._process = await _Process.start(self._python, self._environments)
            process = self._process
        return await process.run(request)

    async def close(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            await process.end()


class _Process:
    """One start of a worker."""

    def __init__(self, process: asyncio.subprocess.Process, mark: str) -> None:
        self._process, self._mark = process, mark
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._cancelled: set[int] = set()
        self._reading: asyncio.Task[None] | None = None
        self.ended = False

    @classmethod
    async def start(cls, python: str | None, environments: Mapping[str, Any]) -> _Process:
        """Raises WorkerGone."""
        adopt_orphans()
        mark = uuid4().hex
        command = _command(python)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=_environment(mark),
                preexec_fn=death_with_parent(os.getpid(), signal.SIGTERM),  # SIGTERM: it ends its own children then
                limit=LONGEST_LINE,
            )
        except OSError as error:
            raise WorkerGone(f"{command[0]} cannot be started: {error}") from error
        one = cls(process, mark)
        one._write({"environments": environments, "prompts": False})
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_S):
                _greeting(await process.stdout.readline(), command[0])
        except TimeoutError:
            await one.end()
            raise WorkerGone(f"verifiers has not loaded the environment within {START_S:g} s") from None
        except BaseException:
            await one.end()
            raise
        one._reading = asyncio.create_task(one._read(process.stdout))
        return one

    async def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        outcome = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._write({"run": number, **request})
        try:
            return await outcome
        except asyncio.CancelledError:
            self._cancelled.add(number)
            self._write({"cancel": number})
            asyncio.get_running_loop().call_later(CANCEL_S, self._end_if_stuck, number)
            raise
        finally:
            self._waiting.pop(number, None)

    async def end(self) -> None:
        """End the worker with all processes that it has started: in order if it can, and otherwise by force."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._exit_code(END_S + 1.0)
        if self._reading is not None:
            await self._reading
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self._mark:
                    process.kill()

    async def _exit_code(self, patience_s: float) -> int:
        """Return how the process ended. It is killed if it has not ended within `patience_s` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                return await self._process.wait()
        with suppress(ProcessLookupError):
            self._process.kill()
        return await self._process.wait()

    def _end_if_stuck(self, number: int) -> None:
        if number in self._cancelled and self._process.returncode is None:
            self._process.kill()

    async def _read(self, lines: asyncio.StreamReader) -> None:
        try:
            while line := await lines.readline():
                outcome = json.loads(line)
                number = outcome.pop("run")
                self._cancelled.discard(number)
                if (waiting := self._waiting.get(number)) and not waiting.done():
                    waiting.set_result(outcome)
        finally:
            self.ended = True
            code = await self._exit_code(CLOSED_S)
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(WorkerGone(f"the process of verifiers ended ({how})"))

    def _write(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")


def _command(python: str | None) -> list[str]:
    # -P: without it, modules beside worker.py would hide packages of the same name
    return [python or sys.executable, "-P", str(WORKER)]


def _environment(mark: str) -> dict[str, str]:
    return {**os.environ, MARK: mark}


def _greeting(line: bytes, python: str) -> dict[str, Any]:
    """Return the first line of a worker. Raises WorkerGone if it reports an error, or if there is none."""
    lowest, below = VERSIONS
    install = f"{python} -m pip install 'verifiers>={lowest},<{below}'"
    if not line.strip():
        raise WorkerGone(f"{python} has ended without an answer instead of loading verifiers: see the log")
    greeting: dict[str, Any] = json.loads(line)
    found = greeting["version"]
    if found is None:
        raise WorkerGone(f"{python} has no verifiers: {install}")
    if not _release(lowest) <= _release(found) < _release(below):
        raise WorkerGone(f"{python} has verifiers {found}; tried are {lowest} to below {below}: {install}")
    if "error" in greeting:
        raise WorkerGone(f"verifiers cannot load the environment: {greeting['error']}")
    return greeting


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version up to the first part that is not one."""
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
