"""The policy endpoint: an HTTP server in the asyncio loop of the agents, for the programs of open sessions."""

from __future__ import annotations

import asyncio
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from hashlib import sha256

from starlette.types import Scope

from megatron_rl.agent.endpoint.routes import Routes
from megatron_rl.agent.endpoint.session import RolloutSession, session_ended
from megatron_rl.agent.server.serving import BACKLOG
from megatron_rl.generate.engine.interface import InferenceInterface
from megatron_rl.generate.serving.access import Access
from megatron_rl.generate.serving.api_errors import ApiError
from megatron_rl.generate.serving.connections import HttpServer
from megatron_rl.model.chat.chat import Chat
from megatron_rl.rank.addresses import own_address
from megatron_rl.recipe.chat_section import EndpointConfig
from megatron_rl.recipe.inference import Sampling

LOOPBACK = "127.0.0.1"
KEEP_ALIVE_S = 600
"""Seconds that a connection may be open without a request. The loop may stand still for as long as a training step; a
shorter limit would then close connections that a program is about to use."""
CUT_S = 2
CLOSE_S = 10.0
BODY_BYTES = 10_000_000
DISCARDED_BYTES = 10 * BODY_BYTES
"""Most bytes of a refused body that are read, so that its program learns why."""
REMEMBERED = 10_000
PREFIX = "/sessions/"


class OpenSessions:
    """Sessions by their keys. A request has the key of its session in the path, as /sessions/KEY/v1/..., or as
    Authorization: Bearer KEY."""

    def __init__(self) -> None:
        self._open: dict[
            bytes, RolloutSession
        ] = {}  # by a hash of the key, so that the time of a look-up reveals nothing
        self._ended: OrderedDict[bytes, None] = OrderedDict()

    def add(self, session: RolloutSession) -> None:
        self._open[_hash(session.api_key)] = session

    def end(self, session: RolloutSession) -> None:
        key = _hash(session.api_key)
        del self._open[key]
        self._ended[key] = None
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        session.end()

    def cancel(self) -> None:
        for session in [*self._open.values()]:
            session.end()

    def admit(self, scope: Scope) -> Scope:
        """Return the scope with its session and without the key, so that no error message contains it. Raises
        ApiError."""
        path: str = scope["path"]
        if path.startswith(PREFIX):
            key, slash, rest = path.removeprefix(PREFIX).partition("/")
            path = slash + rest
        else:
            given = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
            scheme, _, key = given.partition(" ")
            key = key.strip() if scheme.lower() == "bearer" else ""
        state = {**scope.get("state", {}), "session": self._of(key)}
        return {**scope, "path": path, "raw_path": path.encode(), "state": state}

    def _of(self, key: str) -> RolloutSession:
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


def _hash(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogatepass")).digest()


class PolicyEndpoint:
    """Serves the policy to the programs of open sessions. Use it in the loop in which it was opened."""

    def __init__(self, chat: Chat, config: EndpointConfig, listener: socket.socket) -> None:
        self._chat, self._config = chat, config
        self.room = asyncio.Semaphore(config.concurrency)  # for each rollout of its environment
        host, port = listener.getsockname()
        self._address = f"http://{host}:{port}"
        self._sessions = OpenSessions()
        routes = Routes(chat, config).application()
        self._server = HttpServer(
            Access(routes, self._sessions.admit, BODY_BYTES, DISCARDED_BYTES),
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CUT_S,
        )
        self._serving = asyncio.ensure_future(self._serve(listener))

    @classmethod
    async def open(cls, chat: Chat, config: EndpointConfig) -> PolicyEndpoint:
        """Listen, and serve in the running loop. Raises ConfigurationError if the job has no interface, or the recipe
        names a renderer that does not fit."""
        await asyncio.to_thread(partial(chat.check, continues=True))
        host = LOOPBACK if config.listen == "loopback" else own_address()
        return cls(chat, config, socket.create_server((host, 0), backlog=BACKLOG))

    @asynccontextmanager
    async def session(
        self, inference: InferenceInterface, sampling: Sampling, key: int, ordinal: int | None
    ) -> AsyncIterator[RolloutSession]:
        """Open a session for one rollout. At its end, unfinished calls are cancelled, and later ones are refused.

        key, ordinal: see `RolloutSession`.
        """
        if self._serving.done():
            raise RuntimeError("the policy endpoint has stopped") from self._serving.exception()
        session = RolloutSession(self._chat, self._config, self._address, inference, sampling, key, ordinal)
        self._sessions.add(session)
        try:
            yield session
        finally:
            self._sessions.end(session)

    async def close(self) -> None:
        self._sessions.cancel()
        self._server.should_exit = True
        await asyncio.wait([self._serving], timeout=CLOSE_S)
        self._serving.cancel()

    async def _serve(self, listener: socket.socket) -> None:
        with listener:
            await self._server.serve(sockets=[listener])
