"""Preparation of a program in the nursery: its files are read and its function is imported, once for all runs."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from megatron_rl.environments.program.nursery_wire import Program
from megatron_rl.errors import note_task_code, task_location

Rollout = Callable[[Any, Any], Awaitable[Any]]
"""async def rollout(client, problem) -> float | dict"""


class UnusableProgram(Exception):
    """The program can never run; the message says why."""


class PreparedProgram(NamedTuple):
    """A program with all that its runs share."""

    command: list[str] | None
    rollout: Rollout | None
    """The function, if there is no command."""
    files: dict[str, bytes]
    folder: str
    """Parent of all working directories."""


def prepare(program: Program, folder: str) -> PreparedProgram:
    """Read the files and import the function. Raises UnusableProgram."""
    try:
        files = {Path(file).name: Path(file).read_bytes() for file in program.files}
    except OSError as error:
        raise UnusableProgram(f"environment.args.files: {error}") from error
    if program.function is None:
        return PreparedProgram(program.command, None, files, folder)
    code = Path(folder, "code")
    code.mkdir(exist_ok=True)  # an earlier nursery was killed
    for name, content in files.items():
        (code / name).write_bytes(content)
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(code))
    rollout = _function(program.function)
    try:
        import openai  # noqa: F401 - so that no run needs to import it
    except ImportError as error:
        raise UnusableProgram(f"environment.args.function needs a client, `pip install openai`: {error}") from error
    return PreparedProgram(None, rollout, files, folder)


def client() -> Any:
    """Return a client of OpenAI's API for the session that the environment variables name."""
    import openai

    # The endpoint speaks plain HTTP and answers after training: the limit of the run bounds a call.
    http = openai.DefaultAsyncHttpxClient(timeout=None, verify=False, trust_env=False)
    return openai.AsyncOpenAI(timeout=None, http_client=http)


def _function(named: str) -> Rollout:
    module_name, _, name = named.partition(":")
    where = f"environment.args.function {named}"
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:  # the user's module may raise anything
        why = f"{type(error).__name__}: {error}{place(error)}"
        raise UnusableProgram(f"{where}: the module cannot be imported: {why}") from error
    note_task_code(module_name)
    found: Rollout | None = getattr(module, name, None)
    if found is None or not inspect.iscoroutinefunction(found):
        lacks = "defines no" if found is None else "defines another kind of"
        raise UnusableProgram(f"{where}: the module {lacks} {name}: async def {name}(client, problem) -> float | dict")
    threads = psutil.Process().num_threads() - 1
    if threads:
        raise UnusableProgram(
            f"{where}: the module starts {threads} threads when it is imported, which no run would have, because each "
            f"run is a fork: start them in {name}"
        )
    return found


def place(error: BaseException) -> str:
    """Return the place in the user's code where an error arose, such as ` (agent.py:12)`; empty if it is unknown."""
    where, _, _ = task_location(error).partition(": ")
    return f" ({where})" if where else ""
