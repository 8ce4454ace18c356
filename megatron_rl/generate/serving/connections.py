"""uvicorn for every server of this project: how long a connection is held and what is logged of strangers, without
signal handlers."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

LOGGED_EVERY_S = 3600.0
"""Seconds between two lines about the same fault of requests."""


class FirstOfMany(logging.Filter):
    """Passes the first message of each kind, and then one an hour with the number of the others. uvicorn logs each
    request that it cannot read, so a stranger could fill the disk with lines."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[tuple[Any, ...], tuple[float, int]] = {}
        """Time of the last line of each kind, and the number of messages since."""

    def forget(self) -> None:
        self._kinds.clear()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        error = record.exc_info[1] if record.exc_info else None
        kind = (record.msg, type(error), _last_line(error))
        at, more = self._kinds.get(kind, (-LOGGED_EVERY_S, 0))
        passes = (now := self._clock()) - at >= LOGGED_EVERY_S
        if passes and more:
            record.msg = f"{record.msg} ({more} more in {(now - at) / 60:.0f} minutes)"
        self._kinds[kind] = (now, 0) if passes else (at, more + 1)
        return passes


def _last_line(error: BaseException | None) -> tuple[str, int] | None:
    """Place at which an error was raised."""
    trace = error.__traceback__ if error is not None else None
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return None if trace is None else (trace.tb_frame.f_code.co_filename, trace.tb_lineno)


FIRST_OF_MANY = FirstOfMany()


class BoundedConnection(H11Protocol):
    """Closes if no complete request, head and body, arrives within `timeout_keep_alive` seconds after the connection
    was opened or the previous response ended. uvicorn restarts that wait with each byte, and waits forever for the
    first request."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._closing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        # asyncio does so only for sockets whose protocol is named, which those of a given listener are not. A body that
        # follows its head would then wait 40 ms for the client's delayed acknowledgement.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._update_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_timer()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP. The application may still be reading a body that became invalid, and then
        finds its client gone; uvicorn would let it send a second response."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # in the middle of a response
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def _update_timer(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self._closing is None and not self.transport.is_closing():
            self._closing = self.loop.call_later(self.timeout_keep_alive, self.transport.close)

    def _stop_timer(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers and most of its logs: each process of this project has its own."""

    def __init__(self, app: ASGIApp, **options: Any) -> None:
        logging.getLogger("uvicorn.error").addFilter(FIRST_OF_MANY)
        # Each connection is an open file. A process without any left could not even write its signs of life.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        fixed: dict[str, Any] = {"http": BoundedConnection, "ws": "none", "log_config": None, "access_log": False}
        super().__init__(uvicorn.Config(app, **fixed, **options))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
