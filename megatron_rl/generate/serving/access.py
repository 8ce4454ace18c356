"""Access of HTTP clients, for every server of this project: who is admitted, how often, and how large a body may be and
how long it may take."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron_rl.generate.serving.api_errors import ApiError

if TYPE_CHECKING:
    from megatron_rl.generate.serving.metrics import ServerMetrics  # needs the extra `serve`

BODY_S = 60.0
GAVE_UP = 499
"""HTTP status, in metrics, of a request whose client has left before it was answered."""


class Access:
    """ASGI middleware that admits requests and limits their bodies."""

    def __init__(
        self, app: ASGIApp, admit: Callable[[Scope], Scope], body_bytes: int | None, discarded_bytes: int = 0
    ) -> None:
        """
        admit: returns the scope for the application, or raises ApiError.
        body_bytes: most bytes of a body; None: unlimited.
        discarded_bytes: most bytes of a refused body that are read: a client that is still sending when its connection
            closes reads no answer.
        """
        self._app, self._admit = app, admit
        self._body_bytes, self._discarded_bytes = body_bytes, discarded_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            admitted = self._admit(scope)
            self._check_length(scope)
        except ApiError as error:
            error.headers["Connection"] = "close"  # the rest of its body is not read
            await self._discard(receive)
            await error.response()(scope, receive, send)
        else:
            await self._app(admitted, receive if self._body_bytes is None else self._counted(receive), send)

    def _check_length(self, scope: Scope) -> None:
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if self._body_bytes is not None and (not length.isdigit() or int(length) > self._body_bytes):
            raise self._too_large()

    def _counted(self, receive: Receive) -> Receive:
        """Limit also bodies without a Content-Length: the result raises ApiError beyond the limit."""
        size, most = 0, self._body_bytes or 0

        async def count() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > most:
                if message.get("more_body"):
                    await self._discard(receive)
                raise self._too_large()
            return message

        return count

    async def _discard(self, receive: Receive) -> None:
        size = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(BODY_S):
                while size < self._discarded_bytes:
                    message = await receive()
                    size += len(message.get("body", b""))
                    if not message.get("more_body"):
                        return

    def _too_large(self) -> ApiError:
        why = f"the body is larger than {self._body_bytes} bytes"
        return ApiError(413, why, code="body_too_large", headers={"Connection": "close"})


async def read_body(request: Request) -> bytes:
    """Return the body of a request. Raises ApiError."""
    try:
        async with asyncio.timeout(BODY_S):
            return await request.body()
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_S:.0f} s", headers={"Connection": "close"}) from None


def with_token(app: ASGIApp, tokens: Sequence[str], body_bytes: int | None = None) -> ASGIApp:
    allowed = [token.encode() for token in tokens]

    def admit(scope: Scope) -> Scope:
        if _token_of(scope, allowed) is None:
            raise _no_token()
        return scope

    return Access(app, admit, body_bytes)


def _token_of(scope: Scope, tokens: Sequence[bytes]) -> int | None:
    """Return the index of the token that an HTTP request carries, compared in constant time; None if it has none."""
    scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
    matches = [hmac.compare_digest(given.strip(), token) for token in tokens]
    return matches.index(True) if scheme.lower() == b"bearer" and any(matches) else None


def _no_token() -> ApiError:
    return ApiError(
        401,
        "the token is missing or wrong: send the header Authorization: Bearer TOKEN",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


# The inference server


@dataclass(frozen=True, slots=True)
class ServerLimits:
    body_bytes: int = 16 * 2**20
    requests_per_minute: int | None = None
    """Most requests of one token in a minute; None: unlimited."""
    max_waiting: int = 1024
    """Waiting samples beyond which requests are refused."""
    head_s: int = 30
    """Seconds that a connection may be open without a request. Clients keep one for a few seconds, and must not find it
    closed."""
    stall_s: float = 30.0
    """Longest time, in seconds, in which the reader of a stream takes nothing."""
    open_metrics: bool = False


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
    """ASGI middleware of the inference server: access by token, rate and shutdown, and metrics of all requests."""

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
        routes: paths that get a label in the metrics; others share one.
        open_routes: those that need no token, since they reveal nothing of the model and its answers.
        """
        self._app = Access(app, self._admit, limits.body_bytes)
        self._limits, self._metrics, self._routes, self._open_routes = limits, metrics, routes, open_routes
        self._tokens = [token.encode() for token in tokens]
        per_minute = limits.requests_per_minute
        self._allowances = [Allowance(per_minute) for _ in tokens] if per_minute else None
        self.open = 0
        self.closing = False

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
            await self._app(scope, receive, watch)
        finally:
            self.open -= 1
            self._metrics.open_requests.dec()
            self._metrics.requests.labels(route, status if finished else GAVE_UP).inc()

    def _admit(self, scope: Scope) -> Scope:
        token = _token_of(scope, self._tokens)
        is_open = scope["path"] in self._open_routes
        if token is None and not is_open:
            raise _no_token()
        if self.closing and scope["path"] != "/metrics":
            raise ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "10"})
        if self._allowances and token is not None and not is_open and (wait := self._allowances[token].take()):
            raise ApiError(
                429,
                f"more than {self._limits.requests_per_minute} requests a minute: try again later",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(int(wait) + 1)},
            )
        return scope
