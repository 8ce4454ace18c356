"""Responses that end when their client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing, suppress
from typing import Any, TypeVar, cast

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from megatron_rl.agent.scoring import Overtaken, unless
from megatron_rl.generate.serving.api_errors import ClientGone

T = TypeVar("T")


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`, which is cancelled if the client disconnects. Raises ClientGone, or any error of
    `work`.

    receive: of the ASGI application, after the body was read.
    """
    try:
        return await unless(_gone(receive), work)
    except Overtaken:
        raise ClientGone from None


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events as they come. The stream ends if its reader disconnects, or stalls."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncIterator[bytes], stall_s: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first, self._events, self._stall_s = first, events, stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGone):  # the response stays incomplete, so the connection is closed
            async with aclosing(cast(Any, self._events)):
                await unless_gone(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await self._send(send, start)
        await self._send(send, {"type": "http.response.body", "body": self._first, "more_body": True})
        async for piece in self._events:
            await self._send(send, {"type": "http.response.body", "body": piece, "more_body": True})
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, message: Message) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await send(message)
        except TimeoutError:
            raise ClientGone from None
