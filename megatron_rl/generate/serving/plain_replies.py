"""Replies of HTTP servers that others run: their bytes as they come, and not more of them than expected.

httpx unpacks what a server calls gzip or brotli. A few kilobytes of that become gigabytes, in one piece, before any
code of ours could count them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx

PLAIN = {"Accept-Encoding": "identity"}
"""Header of requests whose replies are not packed."""


class ReplyRefused(httpx.RemoteProtocolError):
    """The server sends a reply that is packed, or longer than any it should send."""


def plain(most: int) -> dict[str, Any]:
    """Return the event hooks of an httpx.AsyncClient that refuse packed replies, and those of more than `most` bytes.
    Raise ReplyRefused."""

    async def check(response: httpx.Response) -> None:
        _bound(response, most)

    return {"response": [check]}


def plain_blocking(most: int) -> dict[str, Any]:
    """Return the same for an httpx.Client."""
    return {"response": [lambda response: _bound(response, most)]}


def _bound(response: httpx.Response, most: int) -> None:
    packed = response.headers.get("content-encoding", "").strip().lower()
    if packed not in ("", "identity"):
        raise ReplyRefused(f"a reply packed with {packed[:40]!r}, which was not asked for", request=response.request)
    response.stream = _Counted(response, most)


class _Counted(httpx.AsyncByteStream, httpx.SyncByteStream):
    def __init__(self, response: httpx.Response, most: int) -> None:
        self._stream, self._request, self._left, self._most = response.stream, response.request, most, most

    async def __aiter__(self) -> AsyncIterator[bytes]:
        assert isinstance(self._stream, httpx.AsyncByteStream)
        async for part in self._stream:
            yield self._counted(part)

    def __iter__(self) -> Iterator[bytes]:
        assert isinstance(self._stream, httpx.SyncByteStream)
        for part in self._stream:
            yield self._counted(part)

    async def aclose(self) -> None:
        assert isinstance(self._stream, httpx.AsyncByteStream)
        await self._stream.aclose()

    def close(self) -> None:
        assert isinstance(self._stream, httpx.SyncByteStream)
        self._stream.close()

    def _counted(self, part: bytes) -> bytes:
        self._left -= len(part)
        if self._left < 0:
            raise ReplyRefused(f"a reply of more than {self._most:,} bytes", request=self._request)
        return part
