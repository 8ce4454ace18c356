"""Size of a request body, and the time in which it must arrive."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.requests import Request
from starlette.types import Message, Receive, Scope

from megatron_rl.server.errors import ApiError

BODY_S = 60.0
"""Seconds that a client has to send a body."""


def check_length(scope: Scope, most: int) -> None:
    """Raise ApiError if the request announces a body of more than `most` bytes."""
    length = dict(scope["headers"]).get(b"content-length", b"0")
    if not length.isdigit() or int(length) > most:
        raise _too_large(most)


def counted(receive: Receive, most: int, discarded: int = 0) -> Receive:
    """Limit also bodies without a Content-Length: the result raises ApiError beyond `most` bytes.

    discarded: see `discard`.
    """
    size = 0

    async def count() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > most:
            if message.get("more_body"):
                await discard(receive, discarded)
            raise _too_large(most)
        return message

    return count


async def discard(receive: Receive, most: int) -> None:
    """Read the rest of a body, at most so many bytes of it: a client that is still sending when its connection closes
    reads no answer."""
    size = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(BODY_S):
            while size < most:
                message = await receive()
                size += len(message.get("body", b""))
                if not message.get("more_body"):
                    return


async def read_body(request: Request) -> bytes:
    """Return the body of a request. Raises ApiError."""
    try:
        async with asyncio.timeout(BODY_S):
            return await request.body()
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_S:.0f} s", headers={"Connection": "close"}) from None


def _too_large(most: int) -> ApiError:
    return ApiError(
        413, f"the body is larger than {most} bytes", code="body_too_large", headers={"Connection": "close"}
    )
