"""uvicorn for every server of this project: how long a connection is held, without logs and signal handlers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol


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
    """uvicorn without its logs and signal handlers: each process of this project has its own."""

    def __init__(self, app: ASGIApp, **options: Any) -> None:
        fixed: dict[str, Any] = {"http": BoundedConnection, "ws": "none", "log_config": None, "access_log": False}
        super().__init__(uvicorn.Config(app, **fixed, **options))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
