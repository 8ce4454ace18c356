"""Serving an application as a process that another one has started: where it listens, who is let in, how it ends.

It says on stdout, as one JSON object, where it listens, once it can be asked, or {"error": ...} why it cannot. The
first SIGTERM or SIGINT ends it when all that is under way is answered, the second at once.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
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
"""Connections that wait to be accepted."""
CUT_S = 2
"""That responses have to end once their requests were cut off."""
FEWEST_CHARACTERS = 16
"""Of a token."""


class Unusable(Exception):
    """What a server was started with cannot be used."""


def read_tokens(file: Path) -> list[str]:
    """The bearer tokens in a file, one a line. Raises Unusable."""
    try:
        lines = read_bytes(file).decode("ascii").split("\n")
    except OSError as error:
        raise Unusable(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise Unusable(f"{file}: a token is printable ASCII") from None
    tokens = [line.strip() for line in lines if line.strip()]
    if not tokens:
        raise Unusable(f"{file} holds no token: a line for each")
    for token in tokens:
        if len(token) < FEWEST_CHARACTERS or not token.isprintable() or " " in token:
            raise Unusable(f"{file}: a token has {FEWEST_CHARACTERS} characters or more and no space")
    return tokens


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Taken before anything is loaded, which may take minutes. Raises Unusable."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise Unusable(f"port {port} of {host} is taken: give another --port, or 0 for any that is free") from error
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error
        raise Unusable(f"port {port} of {host} cannot be listened on: {why}") from error
    with listener:
        yield listener


def run_server(token_file: Path, host: str, port: int, work: Callable[[list[str], socket.socket], int]) -> int:
    """The exit code of a server, which is `work` of its tokens and the socket it listens on."""
    die_with_parent()
    for number in SIGNALS:
        signal.signal(number, _interrupt)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the launcher starts us with those blocked
        tokens = read_tokens(token_file)
        with listening(host, port) as listener:
            return work(tokens, listener)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Unusable as error:
        return refused(str(error), EXIT_USAGE)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def allow_connections() -> None:
    """As many open files as we may have: each connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def serve(
    application: ASGIApp,
    listener: socket.socket,
    *,
    stall_s: float,
    keep_alive_s: int,
    about: dict[str, Any],
    leave: Callable[[], Awaitable[None]],
) -> None:
    """Until a signal comes.

    stall_s: that a reader may take nothing. keep_alive_s: that a connection is held without a request.
    leave: what is waited for then, before connections are cut.
    """
    import uvicorn

    from megatron_rl.server.connections import BoundedConnection

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # they are ours

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            host, port = listener.getsockname()[:2]
            address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            say({"address": address, **about})

    # The kernel ends the connection of a reader that takes nothing, which no close does while bytes are left.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_s * 1000))
    config = uvicorn.Config(
        application,
        http=BoundedConnection,
        ws="none",
        timeout_keep_alive=keep_alive_s,
        timeout_graceful_shutdown=CUT_S,
        backlog=BACKLOG,
        log_config=None,
        access_log=False,
    )
    server = Server(config)
    leaving: list[asyncio.Task[None]] = []

    async def end() -> None:
        await leave()
        server.should_exit = True

    def hear() -> None:
        if leaving:
            os._exit(EXIT_INTERRUPTED)  # an engine in the middle of a step would be waited for
        leaving.append(asyncio.get_running_loop().create_task(end()))

    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, hear)
    await server.serve(sockets=[listener])


def say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def refused(why: str, code: int) -> int:
    say({"error": why})
    return code
