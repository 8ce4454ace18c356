"""Admission to the endpoint: which session a request names, and how large it may be."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import sha256

from starlette.types import ASGIApp, Receive, Scope, Send

from megatron_rl.endpoint.session import Session, session_ended
from megatron_rl.server.body_limits import check_length, counted, discard
from megatron_rl.server.errors import ApiError

BODY_BYTES = 10_000_000
"""Most bytes of one request body."""
DISCARDED_BYTES = 10 * BODY_BYTES
"""Most bytes of a refused body that are read, so that its program learns why."""
REMEMBERED = 10_000
"""Most ended sessions that are remembered, whose later requests are answered by the reason."""
PREFIX = "/sessions/"


class Door:
    """ASGI middleware that admits requests with the key of an open session: in the path, as /sessions/KEY/v1/..., or as
    Authorization: Bearer KEY. It passes on the path without the key, so that no error message contains it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._open: dict[bytes, Session] = {}  # by a hash of the key, so that the time of a look-up reveals nothing
        self._ended: OrderedDict[bytes, None] = OrderedDict()

    @property
    def sessions(self) -> list[Session]:
        return [*self._open.values()]

    def admit(self, session: Session) -> None:
        self._open[_hash(session.api_key)] = session

    def end(self, session: Session) -> None:
        """Refuse later requests of a session, and cancel those under way."""
        key = _hash(session.api_key)
        del self._open[key]
        self._ended[key] = None
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        session.end()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            admitted = self._admitted(scope)
            check_length(scope, BODY_BYTES)
        except ApiError as error:
            error.headers["Connection"] = "close"  # the rest of its body is not read
            await discard(receive, DISCARDED_BYTES)
            await error.response()(scope, receive, send)
        else:
            await self._app(admitted, counted(receive, BODY_BYTES, DISCARDED_BYTES), send)

    def _admitted(self, scope: Scope) -> Scope:
        """Return the scope with its session and without the key. Raises ApiError."""
        path: str = scope["path"]
        if path.startswith(PREFIX):
            key, slash, rest = path.removeprefix(PREFIX).partition("/")
            path = slash + rest
        else:
            scheme, _, key = _header(scope).partition(" ")
            key = key.strip() if scheme.lower() == "bearer" else ""
        session = self._session(key)
        state = {**scope.get("state", {}), "session": session}
        return {**scope, "path": path, "raw_path": path.encode(), "state": state}

    def _session(self, key: str) -> Session:
        hashed = _hash(key)
        if session := self._open.get(hashed):
            return session
        if hashed in self._ended:
            raise session_ended()
        raise ApiError(
            401,
            "no session has this key: use OPENAI_BASE_URL, or send the header Authorization: Bearer OPENAI_API_KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _header(scope: Scope) -> str:
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"), "")


def _hash(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogatepass")).digest()
