"""Process that scores answers with a function of the user's, in its main thread.

    stdin    pickles   (NUMBER, positional arguments, keyword arguments), or (NUMBER, None, None) to give that one up
    stdout   JSON      one line per answer, {"number": NUMBER, ...}; the first line describes the function
    stderr   text      what the function and its children print; after each answer a mark with its number

A guard (rank/processes/guard.py), which runs no code of the user's, ends it with all that it starts. Standard library
only, so that a start takes as long as that of Python.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from megatron_rl.agent.reward_value import WrongReward, checked_reward
from megatron_rl.contract.children import OUTSIDE_SIGNALS
from megatron_rl.rank.processes.guard import guard
from megatron_rl.recipe.errors import task_location, task_traceback
from megatron_rl.recipe.own_code import import_function, where_defined

TRACE_CHARACTERS = 4000
TEXT_CHARACTERS = 500
INSIDE = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
"""Errors of the operating system that a repetition does not heal."""
CLIENTS = frozenset({"aiohttp", "anthropic", "grpc", "httpcore", "httpx", "litellm", "openai", "websockets"})
"""Packages that speak to servers and whose exceptions are not of the operating system's kind, as those of requests and
urllib are."""

Function = Callable[..., Any]


def main() -> None:
    job = json.loads(sys.argv[1])
    guard(job["parent"], partial(_be_worker, job))


def _be_worker(job: Mapping[str, Any]) -> None:
    _set_signals()
    requests, replies = _own_pipes(job["mark"])
    sys.path[:] = job["path"]
    function = _loaded(job["file"], job["function"], replies)
    if function is not None:
        serve = _serve_async if inspect.iscoroutinefunction(function) else _serve_plain
        serve(function, requests, replies)


def _set_signals() -> None:
    """Survive the signals that ask a job's processes to leave: the rank ends this one when it is done with it. Ignored
    signals would be ignored by the function's own children as well, which it may want to end."""
    for each in OUTSIDE_SIGNALS:
        signal.signal(each, lambda *_: None)

    def restore() -> None:
        for each in OUTSIDE_SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        allow()

    def hold() -> None:  # a signal for the new process must not arrive before its handlers are restored
        signal.pthread_sigmask(signal.SIG_BLOCK, OUTSIDE_SIGNALS)

    def allow() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, OUTSIDE_SIGNALS)

    os.register_at_fork(before=hold, after_in_parent=allow, after_in_child=restore)


class _Replies:
    """The pipes that were stdout and stderr, which no child program inherits."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._replies, self._printed = os.dup(1), os.dup(2)
        os.dup2(2, 1)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]

    def write(self, number: int, reply: Mapping[str, Any]) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the function may have closed or replaced it
                stream.flush()
        _write(self._printed, f"\0{self._mark} {number}\n".encode())
        _write(self._replies, json.dumps({"number": number, **reply}).encode() + b"\n")


def _write(file: int, left: bytes) -> None:
    while left:
        left = left[os.write(file, left) :]


def _own_pipes(mark: str) -> tuple[IO[bytes], _Replies]:
    requests = os.fdopen(os.dup(0), "rb")
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return requests, _Replies(mark)


def _loaded(file: str, name: str, replies: _Replies) -> Function | None:
    try:
        function = import_function(Path(file), name)
        parameters = [
            [one.name, one.kind.name, one.default is not one.empty]
            for one in inspect.signature(function).parameters.values()
        ]
    except BaseException as error:  # noqa: BLE001 - the user's code may raise anything
        told = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        lacks = error.__cause__.name if isinstance(error.__cause__, ImportError) else None
        replies.write(0, {"unusable": told, "lacks": lacks})
        return None
    waits = inspect.iscoroutinefunction(function)
    replies.write(0, {"parameters": parameters, "place": where_defined(function, file), "waits": waits})
    return function


def _serve_plain(function: Function, requests: IO[bytes], replies: _Replies) -> None:
    while (request := _next(requests)) is not None:
        number, positional, named = request
        if positional is not None:
            began = time.monotonic()
            try:
                reply = {"value": checked_reward(_called(function, positional, named))}
            except BaseException as error:  # noqa: BLE001 - the user's code may raise anything, also to end Python
                reply = _failure(error)
            replies.write(number, {**reply, "seconds": time.monotonic() - began})


def _called(function: Function, positional: Sequence[Any], named: Mapping[str, Any]) -> Any:
    given = function(*positional, **named)
    return asyncio.run(_awaited(given)) if inspect.isawaitable(given) else given


async def _awaited(given: Any) -> Any:
    return await given


def _serve_async(function: Function, requests: IO[bytes], replies: _Replies) -> None:
    """Await all requests concurrently. A thread reads them, because unpickling needs a blocking file."""

    async def serve() -> None:
        loop, running = asyncio.get_running_loop(), dict[int, asyncio.Task[None]]()
        ended = asyncio.Event()

        async def answer(number: int, positional: Sequence[Any], named: Mapping[str, Any]) -> None:
            began = time.monotonic()
            try:
                reply = {"value": checked_reward(await function(*positional, **named))}
            except BaseException as error:  # noqa: BLE001 - the user's code may raise anything
                reply = _failure(error)
            finally:
                del running[number]
            replies.write(number, {**reply, "seconds": time.monotonic() - began})

        def take(number: int, positional: Sequence[Any] | None, named: Mapping[str, Any]) -> None:
            if positional is not None:
                running[number] = loop.create_task(answer(number, positional, named))
            elif number in running:
                running[number].cancel()

        def read() -> None:
            while (request := _next(requests)) is not None:
                loop.call_soon_threadsafe(take, *request)
            loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=read, name="requests", daemon=True).start()
        await ended.wait()

    asyncio.run(serve())


def _next(requests: IO[bytes]) -> tuple[int, Sequence[Any] | None, Mapping[str, Any]] | None:
    try:
        # Only the rank writes into this pipe. Columns may be values that JSON cannot carry, such as numbers as spelled.
        request: tuple[int, Sequence[Any] | None, Mapping[str, Any]] = pickle.load(requests)
    except EOFError:
        return None
    return request


def _failure(error: BaseException) -> dict[str, Any]:
    if isinstance(error, WrongReward):
        return {"wrong": str(error)}
    try:
        text = str(error)
    except Exception as why:  # noqa: BLE001 - `str` of an exception may itself raise
        text = f"its text raises {type(why).__name__}"
    try:
        place, trace = task_location(error), task_traceback(error)
    except Exception:  # noqa: BLE001 - as above
        place, trace = "", ""
    return {
        "raised": type(error).__name__,
        "text": text[:TEXT_CHARACTERS],
        "place": place.partition(": ")[0],
        "trace": trace[-TRACE_CHARACTERS:],
        "outside": is_outside(error),
    }


def is_outside(error: BaseException) -> bool:
    """Whether an exception says that a server, a network or a limit of time failed, not the code that raised it."""
    if isinstance(error, OSError):
        return not isinstance(error, INSIDE)
    return any(kind.__module__.partition(".")[0] in CLIENTS for kind in type(error).__mro__)


if __name__ == "__main__":
    main()
