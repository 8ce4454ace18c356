"""Checks of every request before its body is read: the token, the size, the rate limit of the token, and shutdown."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron_rl.server.body_limits import check_length, counted
from megatron_rl.server.connections import MISSING, token_of
from megatron_rl.server.errors import ApiError
from megatron_rl.server.metrics import ServerMetrics

GAVE_UP = 499
"""HTTP status, in metrics, of a request whose client has left before it was answered."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of the server."""

    body_bytes: int = 16 * 2**20
    """Most bytes of one request body."""
    requests_per_minute: int | None = None
    """Most requests of one token in a minute; None: unlimited."""
    max_waiting: int = 1024
    """Waiting samples beyond which requests are refused."""
    head_s: int = 30
    """Seconds that a connection may be open without a request. Clients keep one for a few seconds, and must not find it
    closed."""
    stall_s: float = 30.0
    """Longest time, in seconds, in which the reader of a stream takes nothing."""


class Allowance:
    """Token bucket of one bearer token: `per_minute` requests a minute, and as many at once."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = per_minute, clock
        self._left, self._at = float(per_minute), clock()

    def take(self) -> float:
        """Use one request. Returns 0, or the seconds until there will be one."""
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._at) * self._most / 60)
        self._at = now
        if self._left >= 1:
            self._left -= 1
            return 0.0
        return (1 - self._left) * 60 / self._most


class Guard:
    """ASGI middleware that applies the checks."""

    def __init__(
        self,
        app: ASGIApp,
        tokens: Sequence[str],
        limits: ServerLimits,
        metrics: ServerMetrics,
        routes: Collection[str],
        open_routes: Collection[str] = (),
    ) -> None:
        """
        routes: paths that get a label of their own in the metrics.
        open_routes: those that need no token, since they reveal nothing of the model and its answers.
        """
        self._app, self._limits, self._metrics, self._routes = app, limits, metrics, routes
        self._open_routes = open_routes
        self._tokens = [token.encode() for token in tokens]
        per_minute = limits.requests_per_minute
        self._allowances = [Allowance(per_minute) for _ in tokens] if per_minute else None
        self.open = 0
        """Number of open requests."""
        self.closing = False
        """Whether the server is shutting down and refuses new requests."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        route = scope["path"] if scope["path"] in self._routes else "other"
        status = GAVE_UP
        finished = False

        async def watch(message: Message) -> None:
            nonlocal status, finished
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                finished = True

        self.open += 1
        self._metrics.open_requests.inc()
        try:
            try:
                self._admit(scope)
            except ApiError as error:
                error.headers["Connection"] = "close"  # its body is not read
                await error.response()(scope, receive, watch)
            else:
                await self._app(scope, counted(receive, self._limits.body_bytes), watch)
        finally:
            self.open -= 1
            self._metrics.open_requests.dec()
            self._metrics.requests.labels(route, status if finished else GAVE_UP).inc()

    def _admit(self, scope: Scope) -> None:
        token = token_of(scope, self._tokens)
        is_open = scope["path"] in self._open_routes
        if token is None and not is_open:
            raise ApiError(
                401,
                MISSING,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if self.closing and scope["path"] != "/metrics":
            raise ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "10"})
        if self._allowances and token is not None and not is_open and (wait := self._allowances[token].take()):
            raise ApiError(
                429,
                f"more than {self._limits.requests_per_minute} requests a minute: try again later",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(int(wait) + 1)},
            )
        check_length(scope, self._limits.body_bytes)
