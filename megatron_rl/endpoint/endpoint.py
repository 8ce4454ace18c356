"""The policy endpoint: an HTTP server in the asyncio loop of the agents."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from megatron_rl.chat.chat import Chat
from megatron_rl.endpoint.config import EndpointConfig
from megatron_rl.endpoint.door import Door
from megatron_rl.endpoint.routes import Routes
from megatron_rl.endpoint.session import Session
from megatron_rl.inference.api import InferenceInterface
from megatron_rl.inference.config import Sampling
from megatron_rl.rank.addresses import own_address
from megatron_rl.server.connections import HttpServer
from megatron_rl.server.serving import BACKLOG, allow_connections

LOOPBACK = "127.0.0.1"
KEEP_ALIVE_S = 600
"""Seconds that a connection may be open without a request. The loop may stand still for as long as a training step; a
shorter limit would then close connections that a program is about to use."""
CUT_S = 2
"""Seconds that responses have to end after the endpoint was closed."""
CLOSE_S = 10.0
"""Longest wait for the end of the server, in seconds."""


class PolicyEndpoint:
    """Serves the policy to the programs of open sessions. Use it in the loop in which it was opened."""

    def __init__(self, chat: Chat, config: EndpointConfig, listener: socket.socket) -> None:
        """listener: bound to its address, and listening."""
        self._chat, self._config = chat, config
        host, port = listener.getsockname()
        self._address = f"http://{host}:{port}"
        self._door = Door(Routes(chat, config).application())
        self._server = HttpServer(
            self._door, lifespan="off", timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=CUT_S
        )
        self._serving = asyncio.ensure_future(self._serve(listener))

    @classmethod
    async def open(cls, chat: Chat, config: EndpointConfig) -> PolicyEndpoint:
        """Listen, and serve in the running loop.

        Raises ConfigurationError if the job has no interface, or the recipe names a renderer that does not fit.
        """
        await asyncio.to_thread(partial(chat.check, continues=True))
        allow_connections()
        host = LOOPBACK if config.listen == "loopback" else own_address()
        return cls(chat, config, socket.create_server((host, 0), backlog=BACKLOG))

    @asynccontextmanager
    async def session(
        self, inference: InferenceInterface, sampling: Sampling, key: int, ordinal: int | None
    ) -> AsyncIterator[Session]:
        """Open a session for one rollout. At its end, calls under way are cancelled, and later ones are refused.

        key, ordinal: see `Session`.
        """
        if self._serving.done():
            raise RuntimeError("the policy endpoint has stopped") from self._serving.exception()
        session = Session(self._chat, self._config, self._address, inference, sampling, key, ordinal)
        self._door.admit(session)
        try:
            yield session
        finally:
            self._door.end(session)

    async def close(self) -> None:
        """Cancel all calls, and stop listening."""
        for session in self._door.sessions:
            session.end()
        self._server.should_exit = True
        await asyncio.wait([self._serving], timeout=CLOSE_S)
        self._serving.cancel()

    async def _serve(self, listener: socket.socket) -> None:
        with listener:
            await self._server.serve(sockets=[listener])
