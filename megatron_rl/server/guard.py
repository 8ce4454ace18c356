"""What every request passes first: the token, its size, how often its token may ask, and whether the server is leaving.

Nothing of a body is read before the token was found right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron_rl.server.connections import MISSING, token_of
from megatron_rl.server.errors import ApiError
from megatron_rl.server.metrics import ServerMetrics

GAVE_UP = 499
"""Status, in metrics, of a request whose client has left before it was answered."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What the server takes on."""

    body_bytes: int = 16 * 2**20
    """Of one request."""
    requests_per_minute: int | None = None
    """For each token; None: as many as come."""
    max_waiting: int = 1024
    """Samples that may wait for the engine; then further requests are turned away."""
    head_s: int = 30
    """That a connection is held without a request. Clients keep one for a few seconds, and must not find it closed."""
    stall_s: float = 30.0
    """That a reader of a stream may take nothing."""


class Allowance:
    """Requests that one token may still make: so many a minute, and as many at once."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = per_minute, clock
        self._left, self._at = float(per_minute), clock()

    def take(self) -> float:
        """Use up one. Returns 0, or the seconds until there will be one again."""
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._at) * self._most / 60)
        self._at = now
        if self._left >= 1:
            self._left -= 1
            return 0.0
        return (1 - self._left) * 60 / self._most


class Guard:
    """Middleware."""

    def __init__(
        self, app: ASGIApp, tokens: Sequence[str], limits: ServerLimits, metrics: ServerMetrics, routes: Collection[str]
    ) -> None:
        """routes: paths that are told apart in the metrics."""
        self._app, self._limits, self._metrics, self._routes = app, limits, metrics, routes
        self._tokens = [token.encode() for token in tokens]
        per_minute = limits.requests_per_minute
        self._allowances = [Allowance(per_minute) for _ in tokens] if per_minute else None
        self.open = 0
        """Requests under way."""
        self.closing = False
        """Whether the server is leaving and takes no further request."""

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
                await self._app(scope, self._counted(receive), watch)
        finally:
            self.open -= 1
            self._metrics.open_requests.dec()
            self._metrics.requests.labels(route, status if finished else GAVE_UP).inc()

    def _admit(self, scope: Scope) -> None:
        token = token_of(scope, self._tokens)
        if token is None:
            raise ApiError(
                401,
                MISSING,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if self.closing and scope["path"] != "/metrics":
            raise ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "10"})
        if self._allowances and (wait := self._allowances[token].take()):
            raise ApiError(
                429,
                f"more than {self._limits.requests_per_minute} requests a minute: try again",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(int(wait) + 1)},
            )
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._limits.body_bytes:
            raise self._too_large()

    def _counted(self, receive: Receive) -> Receive:
        """Reading a body whose length was not said beforehand ends at the limit too."""
        size = 0

        async def count() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._limits.body_bytes:
                raise self._too_large()
            return message

        return count

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body is larger than {self._limits.body_bytes} bytes",
            code="body_too_large",
            headers={"Connection": "close"},
        )
