"""Connections without a complete request are closed, however slowly a client continues to write one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import httpx
import uvicorn
from server_helpers import TOKEN, SayingEngine, running
from starlette.responses import PlainTextResponse
from uvicorn.server import ServerState

from megatron_rl.generate.serving.access import with_token
from megatron_rl.generate.serving.connections import BoundedConnection, HttpServer

TOKEN_HEADER = {"Authorization": f"Bearer {TOKEN}"}
HEAD = f"GET /health HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
PATIENCE_S = 0.3


@asynccontextmanager
async def listening(engine: SayingEngine) -> AsyncIterator[str]:
    """Address of a server."""
    async with running(engine) as application:
        config = uvicorn.Config(application, timeout_keep_alive=PATIENCE_S, log_config=None)  # type: ignore[arg-type]
        state = ServerState()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: BoundedConnection(config, state, {}), "127.0.0.1", 0)
        async with server:
            yield "http://{}:{}".format(*server.sockets[0].getsockname())
        await asyncio.gather(*state.tasks)


async def drip(address: str, beginning: bytes, byte: bytes = b"x") -> bytes:
    """Return the response to a client that writes a byte now and then, until the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
    writer.write(beginning)
    answer = asyncio.ensure_future(reader.read())
    while not answer.done():
        writer.write(byte)
        await asyncio.wait({answer}, timeout=PATIENCE_S / 10)
    writer.close()
    with suppress(ConnectionError):  # the last byte was not read
        return answer.result()
    return b""


def test_connection_without_a_request_is_closed() -> None:
    async def ask() -> None:
        async with listening(SayingEngine()) as address:
            silent = [drip(address, b"", b"") for _ in range(100)]
            slow = drip(address, HEAD + b"X-Slow: ")
            slow_after = drip(address, HEAD + b"Content-Length: 1000000\r\n\r\n")
            assert not any(await asyncio.gather(*silent, slow))
            await slow_after

    asyncio.run(asyncio.wait_for(ask(), 60))


def test_slow_answers_keep_their_connection() -> None:
    """The answer takes longer than a connection may be idle, and the next request follows immediately."""

    async def ask() -> None:
        engine = SayingEngine()
        engine.holds_at = 1
        async with listening(engine) as address, httpx.AsyncClient(headers=TOKEN_HEADER, timeout=60) as client:
            answer = asyncio.create_task(client.post(f"{address}/v1/completions", json={"prompt": "x"}))
            while not engine.running:
                await asyncio.sleep(0.001)
            assert await drip(address, b"", b"") == b""
            assert not answer.done()
            engine.holds_at = None
            assert (await answer).is_success
            assert (await client.get(f"{address}/health")).is_success

    asyncio.run(asyncio.wait_for(ask(), 60))


def test_bodies_do_not_wait_for_the_acknowledgement_of_their_heads() -> None:
    """Otherwise sockets that come from a given listener delay small segments."""

    async def connected() -> int:
        server = HttpServer(with_token(PlainTextResponse("ok"), [], 1000), lifespan="off")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            serving = asyncio.ensure_future(server.serve(sockets=[listener]))
            _, writer = await asyncio.open_connection(*listener.getsockname())
            while not (connections := server.server_state.connections):
                await asyncio.sleep(0.01)
            (connection,) = connections
            delays = connection.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            writer.close()
            server.should_exit = True
            await serving
        return int(delays)

    assert asyncio.run(connected()) != 0
