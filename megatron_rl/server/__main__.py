"""The server as a process of its own, for `mrl serve`:

    python -m megatron_rl.server PATH --token-file FILE [--host H] [--port N] ...

Says on stdout, as one JSON object, where it listens, once it can be asked, or {"error": ...} why it cannot. The first
SIGTERM or SIGINT ends it when all that is under way is answered, the second at once.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import gc
import json
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_rl.contract.codes import EXIT_CRASHED, EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_USAGE
from megatron_rl.contract.files import read_bytes
from megatron_rl.rank.world import die_with_parent

if TYPE_CHECKING:
    from megatron_rl.server.app import Application
    from megatron_rl.server.guard import Limits
    from megatron_rl.standalone import OpenedPolicy

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
BACKLOG = 2048
"""Connections that wait to be accepted."""
CUT_S = 2
"""That responses have to end once their requests were cut off."""
FEWEST_CHARACTERS = 16
"""Of a token."""
LOOK_EVERY_S = 0.05


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of this module; the exit code."""
    options = _parser().parse_args(arguments)
    die_with_parent()
    for number in SIGNALS:
        signal.signal(number, _interrupt)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # `mrl serve` starts us with those blocked
        tokens = read_tokens(options.token_file)
        with _listener(options.host, options.port) as listener:
            return _open_and_serve(options, tokens, listener)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Unusable as error:
        return _refused(str(error), EXIT_USAGE)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m megatron_rl.server", description="Serve a policy.")
    parser.add_argument("path")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--token-file", type=Path, required=True)
    parser.add_argument("--name")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["fp32", "bf16"])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--max-length", type=int)
    parser.add_argument("--max-waiting", type=int, default=1024)
    parser.add_argument("--requests-per-minute", type=int)
    parser.add_argument("--grace-s", type=float, default=30.0)
    return parser


class Unusable(Exception):
    """What the server was started with cannot be used."""


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
def _listener(host: str, port: int) -> Iterator[socket.socket]:
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


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _open_and_serve(options: argparse.Namespace, tokens: list[str], listener: socket.socket) -> int:
    """Imports take seconds; by then what was wrong with the arguments was told."""
    import megatron_rl.platform.megatron_core  # noqa: F401  before the modules below import megatron-core themselves
    from megatron_rl.checkpoint.publish import CheckpointError
    from megatron_rl.errors import ConfigurationError
    from megatron_rl.standalone import open_policy

    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    try:
        from megatron_rl.server.app import Application
        from megatron_rl.server.guard import Limits
    except ImportError as error:
        return _refused(f"serving needs `pip install 'mrl[serve]'`: {error}", EXIT_USAGE)
    limits = Limits(max_waiting=options.max_waiting, requests_per_minute=options.requests_per_minute)
    try:
        with open_policy(
            options.path,
            device=options.device,
            threads=options.threads,
            dtype=options.dtype,
            max_length=options.max_length,
        ) as opened:
            application = Application(
                opened.engine,
                opened.tokenizer,
                model=options.name or opened.source.name,
                max_length=opened.engine.max_length,
                tokens=tokens,
                limits=limits,
            )
            _allow_connections()
            gc.collect()
            gc.freeze()  # looking through torch's objects takes longer than many an answer
            asyncio.run(_serve(application, listener, limits, options.grace_s, _about(opened, options)))
            return EXIT_FINISHED
    except (ConfigurationError, CheckpointError) as error:
        return _refused(str(error), EXIT_USAGE)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _refused(f"{where}{error.strerror or error}", EXIT_CRASHED)


def _about(opened: OpenedPolicy, options: argparse.Namespace) -> dict[str, Any]:
    source = opened.source
    return {
        "model": options.name or source.name,
        "step": source.step,
        "checkpoint": str(source.folder),
        "max_length": opened.engine.max_length,
        "chat": source.tokenizer.chat_template is not None,
    }


def _allow_connections() -> None:
    """As many open files as we may have: each connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _serve(
    application: Application, listener: socket.socket, limits: Limits, grace_s: float, about: dict[str, Any]
) -> None:
    """Until a signal comes. grace_s: that requests under way then have to be answered."""
    import uvicorn

    from megatron_rl.server.connection import BoundedConnection

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # they are ours

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            host, port = listener.getsockname()[:2]
            address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            _say({"address": address, **about})

    # The kernel ends the connection of a reader that takes nothing, which no close does while bytes are left.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limits.stall_s * 1000))
    config = uvicorn.Config(
        application,
        http=BoundedConnection,
        ws="none",
        timeout_keep_alive=limits.head_s,
        timeout_graceful_shutdown=CUT_S,
        backlog=BACKLOG,
        log_config=None,
        access_log=False,
    )
    server = Server(config)
    leaving: list[asyncio.Task[None]] = []

    async def leave() -> None:
        application.guard.closing = True
        give_up = time.monotonic() + grace_s
        while application.guard.open and time.monotonic() < give_up:
            await asyncio.sleep(LOOK_EVERY_S)
        application.thread.stop("the server is shutting down")
        server.should_exit = True

    def hear() -> None:
        if leaving:
            os._exit(EXIT_INTERRUPTED)  # an engine in the middle of a step would be waited for
        leaving.append(asyncio.get_running_loop().create_task(leave()))

    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, hear)
    await server.serve(sockets=[listener])


def _say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def _refused(why: str, code: int) -> int:
    _say({"error": why})
    return code


if __name__ == "__main__":
    sys.exit(main())
