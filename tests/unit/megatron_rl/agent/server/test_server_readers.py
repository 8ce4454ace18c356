"""Readers that leave or are slow: their requests end, and nothing is buffered for them without a limit."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from server_helpers import PAGES, TOKEN, SayingEngine, client_of, encode, running

from megatron_rl.agent.server.application import Application
from megatron_rl.generate.engine.engine_thread import EngineThread
from megatron_rl.generate.engine.interface import GenerationRequest
from megatron_rl.generate.serving.access import ServerLimits
from megatron_rl.recipe.inference import Sampling

LONG = "a long answer " * 25
Message = dict[str, Any]


class Reader:
    """A client, as an ASGI application sees it."""

    def __init__(self, application: Application, **body: Any) -> None:
        self._application = application
        self._body = json.dumps({"prompt": "x", "max_tokens": 300} | body).encode()
        self._sent = False
        self.left = asyncio.Event()
        self.takes = asyncio.Event()
        self.takes.set()
        self.got: list[Message] = []

    async def read(self) -> None:
        scope = {
            "type": "http", "http_version": "1.1", "method": "POST", "path": "/v1/completions", "raw_path": b"",
            "query_string": b"", "root_path": "", "scheme": "http", "server": ("server", 80), "client": ("me", 1),
            "headers": [(b"authorization", f"Bearer {TOKEN}".encode())],
        }  # fmt: skip
        await self._application(scope, self._receive, self._send)

    async def _receive(self) -> Message:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.got.append(message)
        await self.takes.wait()


async def until(what: Callable[[], bool]) -> None:
    while not what():
        await asyncio.sleep(0.001)


def limited(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    async def within() -> None:
        await asyncio.wait_for(test(), 60)

    def run() -> None:
        asyncio.run(within())

    run.__name__ = test.__name__
    return run


@pytest.mark.parametrize("stream", [False, True])
def test_reader_that_leaves_frees_its_pages(stream: bool) -> None:
    async def leave() -> None:
        engine = SayingEngine(LONG)
        engine.holds_at = 3
        async with running(engine) as application:
            reader = Reader(application, stream=stream, n=2)
            reading = asyncio.create_task(reader.read())
            await until(lambda: engine.running == 2)
            if stream:
                await until(lambda: len(reader.got) > 1)
            reader.left.set()
            await reading
            await until(lambda: engine.running == 0)
            await until(lambda: application.thread.load.free_pages == PAGES)
            assert application.guard.open == 0

    asyncio.run(asyncio.wait_for(leave(), 60))


@limited
async def test_reader_that_takes_nothing_is_cut_off() -> None:
    engine = SayingEngine(LONG)
    async with running(engine, limits=ServerLimits(stall_s=0.05)) as application:
        reader = Reader(application, stream=True)
        reader.takes.clear()
        await reader.read()
        await until(lambda: engine.running == 0)
        assert reader.got[-1].get("more_body", True), "the end of the body must not look regular"


@limited
async def test_slow_reader_does_not_delay_another() -> None:
    async with running(SayingEngine(LONG)) as application:
        slow = Reader(application, stream=True)
        slow.takes.clear()
        reading = asyncio.create_task(slow.read())
        await until(lambda: bool(slow.got))
        async with client_of(application) as client:
            answer = (await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 300})).json()
        assert answer["choices"][0]["text"] == LONG[: len(answer["choices"][0]["text"])]
        slow.takes.set()
        await reading
        assert b"[DONE]" in slow.got[-2]["body"]


class BusyEngine(SayingEngine):
    """An engine that stays in the middle of a step until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.in_step, self.may_go_on = threading.Event(), threading.Event()

    def step(self) -> None:
        self.in_step.set()
        assert self.may_go_on.wait(60)
        super().step()


@limited
async def test_waiting_samples_are_counted_while_the_engine_computes() -> None:
    engine = BusyEngine()
    thread = EngineThread(engine)
    thread.start()
    for count in (1, 2):
        thread.submit(GenerationRequest(encode("x"), 1, Sampling(max_new_tokens=3), 0), False, asyncio.Event())
        assert await asyncio.to_thread(engine.in_step.wait, 60)
        assert thread.waiting == count
    engine.may_go_on.set()
    await until(lambda: thread.waiting == 0)
    thread.stop("enough")
    assert await asyncio.to_thread(thread.join)
