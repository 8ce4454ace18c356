"""The process of worker.py: started, asked, and ended with all that it started."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from megatron_rl.contract.children import death_with_parent, how_ended, yield_memory
from megatron_rl.environments.vf.config import VERSIONS
from megatron_rl.environments.vf.worker import END_S, LONGEST_LINE
from megatron_rl.rank.marked_processes import MarkedProcesses

START_S = 600.0
"""Seconds to load the environment and its tasks, which may come from the hub or a slow file system."""
CANCEL_S = 60.0
"""Seconds in which a worker must give up a rollout that is cancelled. One that does not is stuck, and is ended."""
CLOSED_S = 1.0
"""Seconds until a worker that has closed its output, and so cannot answer any more, is killed."""
WORKER = Path(__file__).with_name("worker.py")


class WorkerGone(Exception):
    """The worker cannot be started, or has ended; the message says why."""


def list_tasks(
    python: str | None, environments: Mapping[str, Any], variables: Mapping[str, str]
) -> dict[str, list[str]]:
    """Return the prompts of the tasks of each environment, from a worker that ends then.

    Args:
        environments: what `worker.Loaded` needs, by name.
        variables: all environment variables of the worker.

    Raises ValueError if the environments cannot be loaded.
    """
    request = json.dumps({"environments": environments, "prompts": True}) + "\n"
    command = _command(python)
    try:
        done = subprocess.run(
            command,
            input=request.encode(),
            stdout=subprocess.PIPE,
            env=dict(variables),
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

    def __init__(self, python: str | None, environments: Mapping[str, Any], variables: Mapping[str, str]) -> None:
        """
        environments: what `worker.Loaded` needs, by name.
        variables: all environment variables of the worker.
        """
        self._python, self._environments, self._variables = python, environments, variables
        self._starting = asyncio.Lock()
        self._process: _Process | None = None

    async def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outcome of a rollout. Cancellation ends the rollout in the worker too.

        Raises WorkerGone if the worker cannot be started, or ends before the rollout does.
        """
        async with self._starting:
            if self._process is None or self._process.ended:
                await self.close()
                self._process = await _Process.start(self._python, self._environments, self._variables)
            process = self._process
        return await process.run(request)

    async def close(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            await process.end()


class _Process:
    """One start of a worker."""

    def __init__(self, process: asyncio.subprocess.Process, all_of_it: MarkedProcesses) -> None:
        self._process, self._all = process, all_of_it
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._cancelled: set[int] = set()
        self._reading: asyncio.Task[None] | None = None
        self.ended = False

    @classmethod
    async def start(cls, python: str | None, environments: Mapping[str, Any], variables: Mapping[str, str]) -> _Process:
        """Raises WorkerGone."""
        started = MarkedProcesses()
        command = _command(python)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**variables, **started.environment},
                preexec_fn=_begin(death_with_parent(os.getpid(), signal.SIGTERM)),  # it ends its own children then
                limit=LONGEST_LINE,
            )
        except OSError as error:
            raise WorkerGone(f"{command[0]} cannot be started: {error}") from error
        one = cls(process, started)
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
        self._all.kill()  # such as servers of tools

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
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(WorkerGone(f"the process of verifiers ended ({how_ended(code)})"))

    def _write(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")


def _command(python: str | None) -> list[str]:
    # -P: without it, modules beside worker.py would hide packages of the same name
    return [python or sys.executable, "-P", str(WORKER)]


def _begin(ask_for_death: Callable[[], None]) -> Callable[[], None]:
    def begin() -> None:
        ask_for_death()
        yield_memory()

    return begin


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
