"""Servers that another process has started: where they listen, whom they admit, and how they end.

A server prints one JSON object on stdout when it is ready, with its address; or {"error": ...} if it cannot start. The
first SIGTERM or SIGINT ends it when all open requests are answered, the second one immediately.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_rl.contract.codes import EXIT_INTERRUPTED, EXIT_USAGE
from megatron_rl.contract.files import read_bytes
from megatron_rl.rank.world import die_with_parent

if TYPE_CHECKING:
    from starlette.types import ASGIApp

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
BACKLOG = 2048
CUT_S = 2
"""Limit, in seconds, for responses to end after their requests were cut off."""
FEWEST_CHARACTERS = 16


class UnusableArgument(Exception):
    """An argument of a server cannot be used."""


def read_tokens(file: Path) -> list[str]:
    """Return the bearer tokens in a file, one per line. Raises Unusable."""
    try:
        lines = read_bytes(file).decode("ascii").split("\n")
    except OSError as error:
        raise UnusableArgument(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise UnusableArgument(f"{file}: a token must be printable ASCII") from None
    tokens = [line.strip() for line in lines if line.strip()]
    if not tokens:
        raise UnusableArgument(f"{file} holds no token: write one per line")
    for token in tokens:
        if len(token) < FEWEST_CHARACTERS or not token.isprintable() or " " in token:
            raise UnusableArgument(f"{file}: a token must have {FEWEST_CHARACTERS} characters or more and no space")
    return tokens


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Listen before anything is loaded, which may take minutes. Raises Unusable."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UnusableArgument(
                f"port {port} of {host} is in use: give another --port, or 0 for any free port"
            ) from error
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error
        raise UnusableArgument(f"port {port} of {host} cannot be listened on: {why}") from error
    with listener:
        yield listener


def run_server(token_file: Path, host: str, port: int, work: Callable[[list[str], socket.socket], int]) -> int:
    """Run `work` with the tokens and the listening socket, and return the exit code of the server."""
    die_with_parent()
    for number in SIGNALS:
        signal.signal(number, _interrupt)
    try:
        tokens = read_tokens(token_file)
        with listening(host, port) as listener:
            return work(tokens, listener)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except UnusableArgument as error:
        return refused(str(error), EXIT_USAGE)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


async def serve(
    application: ASGIApp,
    listener: socket.socket,
    *,
    stall_s: float,
    keep_alive_s: int,
    about: dict[str, Any],
    leave: Callable[[], Awaitable[None]],
) -> None:
    """Serve until a signal comes.

    stall_s: longest time, in seconds, in which a reader takes nothing. keep_alive_s: seconds that a connection may be
    open without a request.
    leave: awaited after the signal, before connections are cut.
    """
    from megatron_rl.generate.serving.connections import HttpServer  # needs the extra `serve`, which may be missing

    class Server(HttpServer):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            host, port = listener.getsockname()[:2]
            address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            say({"address": address, **about})

    # Closing waits for a reader that takes nothing, as long as bytes are left; the kernel's timeout ends it.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_s * 1000))
    server = Server(application, timeout_keep_alive=keep_alive_s, timeout_graceful_shutdown=CUT_S, backlog=BACKLOG)
    leaving: list[asyncio.Task[None]] = []

    async def end() -> None:
        await leave()
        server.should_exit = True

    def on_signal() -> None:
        if leaving:
            os._exit(EXIT_INTERRUPTED)  # a normal exit would wait for the engine's step
        leaving.append(asyncio.get_running_loop().create_task(end()))

    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    await server.serve(sockets=[listener])


def say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def refused(why: str, code: int) -> int:
    say({"error": why})
    return code
