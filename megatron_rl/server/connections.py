"""Admission of HTTP clients, for every server of this project: bearer tokens, and how long a connection is held."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

MISSING = "the token is missing or wrong: Authorization: Bearer TOKEN"


def token_of(scope: Scope, tokens: Sequence[bytes]) -> int | None:
    """Which of the tokens an HTTP request has, compared in constant time; None: none of them."""
    scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
    matches = [hmac.compare_digest(given.strip(), token) for token in tokens]
    return matches.index(True) if scheme.lower() == b"bearer" and any(matches) else None


class BoundedConnection(H11Protocol):
    """Closed where no request has come whole, head and all, `timeout_keep_alive` after the connection or the response
    before. uvicorn begins to wait anew with each byte, and for the first request waits for ever."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._look()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()

    def _look(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._patience is None and not self.transport.is_closing():
            self._patience = self.loop.call_later(self.timeout_keep_alive, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
