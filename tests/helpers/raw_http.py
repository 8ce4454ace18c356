"""Bytes that are sent to a server's socket: requests that no HTTP client writes."""

from __future__ import annotations

import asyncio
import gzip
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import cache
from random import Random
from typing import Any, NamedTuple

from odd_values import spoilt
from starlette.types import ASGIApp

from megatron_rl.generate.serving.connections import HttpServer

HOST = b"Host: x\r\n"
CLOSE = b"Connection: close\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"


class Asked(NamedTuple):
    """A good request, from which bad ones are made."""

    path: bytes
    token: bytes
    body: bytes

    @property
    def line(self) -> bytes:
        return b"POST " + self.path + b" HTTP/1.1\r\n"

    @property
    def admitted(self) -> bytes:
        return HOST + b"Authorization: Bearer " + self.token + b"\r\n"

    @property
    def length(self) -> bytes:
        return b"Content-Length: %d\r\n" % len(self.body)

    def sent(self, headers: bytes, body: bytes | None = None, *, admitted: bytes | None = None) -> bytes:
        head = self.line + (self.admitted if admitted is None else admitted) + headers
        return head + b"\r\n" + (self.body if body is None else body)


@cache
def hostile_requests(asked: Asked) -> dict[str, list[bytes]]:
    """Names of requests, and the pieces in which they are sent."""
    line, admitted, length, sent = asked.line, asked.admitted, asked.length, asked.sent
    packed = gzip.compress(asked.body, mtime=0)
    upgrade = b"Connection: Upgrade\r\nUpgrade: %s\r\n"
    one: dict[str, bytes] = {
        "bytes": b"\x00\x01\xff\xfe\r\n\r\n",
        "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        "HTTP/0.9": b"GET /\r\n",
        "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "HTTP/1.0": line.replace(b"1.1", b"1.0") + admitted + length + b"\r\n" + asked.body,
        "no host": line + b"\r\n",
        "two hosts": sent(HOST + length),
        "a name with a space": sent(b"A b: c\r\n"),
        "a line without a colon": sent(b"abc\r\n"),
        "a zero byte": sent(b"A: \0\r\n"),
        "a folded line": sent(b"A: b\r\n c\r\n" + length + CLOSE),
        "lines that end in LF": sent(length + CLOSE).replace(b"\r\n", b"\n"),
        "a lone CR": sent(b"A: b\rc\r\n"),
        "a huge header": sent(b"A: " + b"x" * 300_000 + b"\r\n"),
        "many headers": sent(b"A: b\r\n" * 3000 + length + CLOSE),
        "headers without end": line + HOST + b"A: b\r\n" * 60_000,
        "a long path": b"GET /" + b"a" * 300_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n",
        "a path of other bytes": b"POST /\xff%ff HTTP/1.1\r\n" + HOST + b"\r\n",
        "an odd path": b"POST /%ff%00%zz/..%2f//%0d%0aX HTTP/1.1\r\n" + admitted + CLOSE + b"\r\n",
        "a whole URL": b"POST http://x/ HTTP/1.1\r\n" + admitted + CLOSE + b"\r\n",
        "CONNECT": b"CONNECT x:443 HTTP/1.1\r\n" + admitted + CLOSE + b"\r\n",
        "OPTIONS *": b"OPTIONS * HTTP/1.1\r\n" + admitted + CLOSE + b"\r\n",
        "an odd method": b"!#$ / HTTP/1.1\r\n" + admitted + CLOSE + b"\r\n",
        **{
            f"a length of {name}": sent(b"Content-Length: " + text + b"\r\n" + CLOSE)
            for name, text in {
                "-5": b"-5", "+5": b"+5", "0x5": b"0x5", "nothing": b"", "other digits": "٣".encode(),
                "20 digits": b"9" * 20, "5,000 digits": b"9" * 5000, "two values": b"5, 6", "less": b"1",
            }.items()
        },
        "two lengths": sent(b"Content-Length: 5\r\nContent-Length: 6\r\n"),
        "a length and chunks": sent(length + CHUNKED + CLOSE, b"0\r\n\r\n"),
        "another coding": sent(b"Transfer-Encoding: gzip, chunked\r\n", b"0\r\n\r\n"),
        "chunks of no number": sent(CHUNKED, b"zz\r\n{}"),
        "chunks of -1": sent(CHUNKED, b"-1\r\n{}"),
        "a chunk without end": sent(CHUNKED, b"f" * 30 + b"\r\n{}"),
        "a chunk with a long extension": sent(CHUNKED + CLOSE, b"2;" + b"a" * 100_000 + b"\r\n{}\r\n0\r\n\r\n"),
        "a bad trailer": sent(CHUNKED + CLOSE, b"2\r\n{}\r\n0\r\n A b\r\n\r\n"),
        "a packed body": sent(b"Content-Encoding: gzip\r\nContent-Length: %d\r\n" % len(packed) + CLOSE, packed),
        "another expectation": sent(b"Expect: x\r\n" + length + CLOSE),
        "a web socket": sent(upgrade % b"websocket" + length + CLOSE),
        "HTTP/2 later": sent(upgrade % b"h2c" + length + CLOSE),
        "several at once": sent(length) * 3 + sent(length + CLOSE),
        "bytes after a request": sent(length) + b"bytes\r\n\r\n",
        "a token of other bytes": sent(length + CLOSE, admitted=HOST + b"Authorization: Bearer \xff\xfe\r\n"),
        "a long token": sent(length + CLOSE, admitted=HOST + b"Authorization: Bearer " + b"x" * 60_000 + b"\r\n"),
        "no token, bad chunks": sent(CHUNKED, b"zz\r\n\r\n", admitted=HOST),
        **{
            f"a body of {name}": sent(b"Content-Length: %d\r\n" % len(text) + CLOSE, text)
            for name, text in {
                "nothing": b"", "other bytes": b"\xff\xfe", "deep lists": b"[" * 200_000, "many digits": b"9" * 5000,
                "NaN": b'{"prompt": NaN, "driver": NaN}', "half a character": b'{"prompt": "\\ud800", "a": "\\udfff"}',
                "a list": b"[]", "UTF-16": "{}".encode("utf-16"), "deep objects": b'{"a":' * 100_000,
            }.items()
        },
    }  # fmt: skip
    return {
        **{name: [text] for name, text in one.items()},
        "chunks that become bad": [sent(CHUNKED, b"2\r\n{}\r\n"), b"zz\r\n"],
        "a body that ends early": [sent(b"Content-Length: 1000\r\n", b"{")],
        "a head that ends early": [line[:9]],
        "a body after its refusal": [sent(CHUNKED, b"2\r\n{}\r\n", admitted=HOST), b"2\r\n{}\r\n", b"zz\r\n"],
        "a body that waits to be asked for": [sent(b"Expect: 100-continue\r\n" + length + CLOSE, b""), asked.body],
    }


def spoilt_request(asked: Asked, random: Random) -> list[bytes]:
    """Pieces of a request in which bytes were changed, lost or doubled."""
    name = random.choice([*hostile_requests(asked)])
    request = b"".join(hostile_requests(asked)[name]) if random.randrange(2) else asked.sent(asked.length + CLOSE)
    data = spoilt(request[:5000], random)
    at = random.randrange(len(data) + 1)
    return [data[:at], data[at:]] if random.randrange(4) == 0 else [data]


@asynccontextmanager
async def on_a_socket(app: ASGIApp, **options: Any) -> AsyncIterator[int]:
    """Port at which a server of this project offers an application. options: of HttpServer."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        server = HttpServer(app, lifespan="off", **options)
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await serving


async def reply_to(port: int, pieces: list[bytes], *, half: bool = False) -> bytes:
    """Send pieces, and return all bytes until the server closes the connection; those before a reset are lost.

    half: whether the client ends its side of the connection after the last piece.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        with suppress(OSError):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if half:
                writer.write_eof()
        with suppress(ConnectionError):
            return await reader.read()
        return b""
    finally:
        writer.close()
