"""Access of HTTP clients, for every server of this project: who is admitted, and how large a body may be."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron_rl.generate.serving.api_errors import ApiError
from megatron_rl.generate.serving.error_responses import response_to

BODY_S = 60.0


class Access:
    """ASGI middleware that admits requests and limits their bodies."""

    def __init__(
        self, app: ASGIApp, admit: Callable[[Scope], Scope], body_bytes: int, discarded_bytes: int = 0
    ) -> None:
        """
        admit: returns the scope for the application, or raises ApiError.
        body_bytes: most bytes of a body.
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
            await response_to(error)(scope, receive, send)
        else:
            await self._app(admitted, self._counted(receive), send)

    def _check_length(self, scope: Scope) -> None:
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._body_bytes:
            raise self._too_large()

    def _counted(self, receive: Receive) -> Receive:
        """Limit also bodies without a Content-Length: the result raises ApiError beyond the limit."""
        size, most = 0, self._body_bytes

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
    except ClientDisconnect:
        raise ApiError(499, "the client left before its body was complete") from None  # nobody reads it
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_S:.0f} s", headers={"Connection": "close"}) from None


def with_token(app: ASGIApp, tokens: Sequence[str], body_bytes: int) -> ASGIApp:
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
    max_waiting: int = 1024
    """Waiting samples beyond which requests are refused."""
    head_s: int = 30
    """Seconds that a connection may be open without a request. Clients keep one for a few seconds, and must not find it
    closed."""
    stall_s: float = 30.0
    """Longest time, in seconds, in which the reader of a stream takes nothing."""


class Guard:
    """ASGI middleware of the inference server: access by token and shutdown."""

    def __init__(
        self, app: ASGIApp, tokens: Sequence[str], limits: ServerLimits, open_routes: Collection[str] = ()
    ) -> None:
        """open_routes: those that need no token, since they reveal nothing of the model and its answers."""
        self._app = Access(app, self._admit, limits.body_bytes)
        self._open_routes = open_routes
        self._tokens = [token.encode() for token in tokens]
        self.open = 0
        self.closing = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.open += scope["type"] == "http"
        try:
            await self._app(scope, receive, send)
        finally:
            self.open -= scope["type"] == "http"

    def _admit(self, scope: Scope) -> Scope:
        if scope["path"] not in self._open_routes and _token_of(scope, self._tokens) is None:
            raise _no_token()
        if self.closing:
            raise ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "10"})
        return scope
