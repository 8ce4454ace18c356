"""The process of verifiers_worker.py: started, asked, and ended with all that it started."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.agent.environments.vf.verifiers_worker import END_S
from megatron_rl.rank.processes.answering import AnsweringProcess, Died, Language
from megatron_rl.rank.processes.guard import guarded

VERSIONS = ("0.4", "0.5")  # versions of verifiers that were tried: from the first, below the second
START_S = 600.0
"""Seconds to load the environment and its tasks, which may come from the hub or a slow file system."""
CANCEL_S = 60.0
"""Seconds in which a worker must give up a rollout that is cancelled. One that does not is stuck, and is ended."""
LATE = f"verifiers has not loaded the environment within {START_S:g} s"
WORKER = Path(__file__).with_name("verifiers_worker.py")


class WorkerGone(Exception):
    """The worker cannot be started, or has ended; the message says why."""


def list_tasks(
    python: str | None, environments: Mapping[str, Any], variables: Mapping[str, str]
) -> dict[str, list[str]]:
    """Return the prompts of the tasks of each environment, from a worker that ends then.

    Args:
        environments: what `verifiers_worker.Loaded` needs, by name.
        variables: all environment variables of the worker.

    Raises ValueError if the environments cannot be loaded.
    """
    command = _command(python)
    if shutil.which(command[0]) is None:
        raise ValueError(f"environment.args.python: {command[0]} cannot be started: it is not an executable file")
    request = _line({"environments": environments, "prompts": True})
    try:
        done = subprocess.run(
            guarded(command), input=request, stdout=subprocess.PIPE, env=dict(variables), timeout=START_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(LATE) from error
    if not done.stdout.strip():
        raise ValueError(_without_answer(command[0]))
    greeting = json.loads(done.stdout)
    try:
        _check(greeting, command[0])
    except WorkerGone as error:
        raise ValueError(str(error)) from error
    prompts: dict[str, list[str]] = greeting["prompts"]
    return prompts


class VerifiersWorker:
    """A worker that is started when it is first asked, and again after its death. For one event loop."""

    def __init__(self, python: str | None, environments: Mapping[str, Any], variables: Mapping[str, str]) -> None:
        """
        environments: what `verifiers_worker.Loaded` needs, by name.
        variables: all environment variables of the worker.
        """
        self._python, self._environments, self._variables = python, environments, variables
        self._starting = asyncio.Lock()
        self._process: AnsweringProcess | None = None

    async def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outcome of a rollout. Cancellation ends the rollout in the worker too. Raises WorkerGone if the
        worker cannot be started, or ends before the rollout does."""
        async with self._starting:
            if self._process is None or self._process.ended:
                await self.close()
                self._process = await self._started()
            process = self._process
        try:
            return dict((await process.ask(request)).said)
        except Died as error:
            raise WorkerGone(f"the process of verifiers ended ({error})") from error

    async def close(self) -> None:
        """End the worker with all processes that it has started, such as servers of tools: cleanly if it can."""
        if self._process is not None:
            process, self._process = self._process, None
            await process.end()

    async def _started(self) -> AnsweringProcess:
        command = _command(self._python)
        opening = _line({"environments": self._environments, "prompts": False})
        language = Language(_encoded, cancel_s=CANCEL_S, grace_s=END_S)
        try:
            process = await AnsweringProcess.start(
                guarded(command, END_S), language, START_S, env=self._variables, opening=opening
            )
        except TimeoutError:
            raise WorkerGone(LATE) from None
        except Died:
            raise WorkerGone(_without_answer(command[0])) from None
        except OSError as error:
            raise WorkerGone(f"{command[0]} cannot be started: {error}") from error
        try:
            _check(process.described, command[0])
        except WorkerGone:
            await process.end()
            raise
        return process


def _encoded(number: int, request: Mapping[str, Any] | None) -> bytes:
    return _line({"cancel": number} if request is None else {"number": number, **request})


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _command(python: str | None) -> list[str]:
    # -P: without it, modules beside verifiers_worker.py would hide packages of the same name
    return [python or sys.executable, "-P", str(WORKER)]


def _without_answer(python: str) -> str:
    return f"{python} has ended without an answer instead of loading verifiers: see the log"


def _check(greeting: Mapping[str, Any], python: str) -> None:
    """Raise WorkerGone if the first line of a worker reports an error."""
    lowest, below = VERSIONS
    install = f"{python} -m pip install 'verifiers>={lowest},<{below}'"
    found = greeting["version"]
    if found is None:
        raise WorkerGone(f"{python} has no verifiers: {install}")
    if not _release(lowest) <= _release(found) < _release(below):
        raise WorkerGone(f"{python} has verifiers {found}; tried are {lowest} to below {below}: {install}")
    if "error" in greeting:
        raise WorkerGone(f"verifiers cannot load the environment: {greeting['error']}")


def _release(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
