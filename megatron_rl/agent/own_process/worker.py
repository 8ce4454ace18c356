"""Process that scores answers with a function of the user's, in its main thread.

    rank --(pipes)--> guard --(fork)--> worker, and all that it starts

    stdin    pickles   (NUMBER, positional arguments, keyword arguments), or (NUMBER, None, None) to give that one up
    stdout   JSON      one line per answer, {"number": NUMBER, ...}; the first line describes the function
    stderr   text      what the function and its children print; after each answer a mark with its number

The guard runs no code of the user's. It kills the worker and all descendants, also those in sessions of their own, when
the worker ends, when the rank orders it, and when the rank ends in any way. Standard library only, so that a start
takes as long as that of Python.
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
from pathlib import Path
from typing import IO, Any, NoReturn

from megatron_rl.agent.own_process.outside import is_outside
from megatron_rl.agent.reward_value import WrongReward, checked_reward
from megatron_rl.contract.children import (
    OUTSIDE_SIGNALS,
    adopt_orphans,
    death_with_parent,
    end_descendants,
    yield_memory,
)
from megatron_rl.errors import task_location, task_traceback
from megatron_rl.recipe.own_code import import_function, where_defined

END = signal.SIGRTMIN
"""Signal by which the rank, or the kernel at the rank's death, orders the guard to end everything."""
END_S = 5.0
"""Seconds that the kernel has to end killed processes; one that hangs in a file system may need longer."""
TRACE_CHARACTERS = 4000
TEXT_CHARACTERS = 500
SIGNALLED = 128
"""The guard's exit code is the worker's, or this plus the number of the signal that ended the worker."""

Function = Callable[..., Any]


def main() -> None:
    """Fork the worker and guard it."""
    job = json.loads(sys.argv[1])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, END})
    for each in OUTSIDE_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    adopt_orphans()
    guard = os.getpid()
    worker = os.fork()
    if worker == 0:
        _be_worker(job, guard)
    death_with_parent(job["parent"], END)()
    with Path(os.devnull).open("r+b") as nothing:
        for number in range(3):
            os.dup2(nothing.fileno(), number)  # the pipes close with the worker
    code = None
    while code is None and signal.sigwait({signal.SIGCHLD, END}) != END:
        code = _ended(worker)
    end_descendants(END_S)
    os._exit(SIGNALLED + signal.SIGKILL if code is None else code if code >= 0 else SIGNALLED - code)


def _ended(worker: int) -> int | None:
    """Collect ended children; return the worker's exit code, negative for a signal; None if it still runs."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in (0, worker):
            return os.waitstatus_to_exitcode(status) if pid else None


def _be_worker(job: Mapping[str, Any], guard: int) -> NoReturn:
    """Answer requests until stdin ends, and exit: nothing may return into the guard's code."""
    code = 1
    try:
        death_with_parent(guard)()
        yield_memory()  # not the rank, which loses far more
        _set_signals()
        requests, replies = _own_pipes(job["mark"])
        sys.path[:] = job["path"]
        function = _loaded(job["file"], job["function"], replies)
        if function is not None:
            serve = _serve_async if inspect.iscoroutinefunction(function) else _serve_plain
            serve(function, requests, replies)
        code = 0
    except BaseException:  # noqa: BLE001 - as above
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _set_signals() -> None:
    """Survive the signals that ask a job's processes to leave: the rank ends this one when it is done with it.

    Ignored signals would be ignored by the function's own children as well, which it may want to end.
    """
    for each in OUTSIDE_SIGNALS:
        signal.signal(each, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD, END})

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
    """Import the function and describe it to the rank; None if that fails."""
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
            reply = _reply(lambda a=positional, k=named: _called(function, a, k))  # type: ignore[misc]
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


def _reply(score: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": checked_reward(score())}
    except BaseException as error:  # noqa: BLE001 - the user's code may raise anything, also to end the interpreter
        return _failure(error)


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


if __name__ == "__main__":
    main()
