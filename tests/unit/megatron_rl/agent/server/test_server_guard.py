"""Checks of every request before its body is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Any

import httpx
import pytest
from server_helpers import TOKEN, SayingEngine, ask, client_of, running

from megatron_rl.generate.serving.access import ServerLimits

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "x", "max_tokens": 3}
VERSION = version("mrl")
ROUTES = ["/v1/models", "/load", COMPLETIONS, "/nothing"]


@pytest.mark.parametrize("route", ROUTES)
def test_nothing_is_revealed_without_the_token(route: str) -> None:
    for token in ("", TOKEN[:-1], TOKEN + "x"):
        response = ask(SayingEngine(), route, b"x" * 10**6, token=token)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert TOKEN not in response.text


@pytest.mark.parametrize("token", ["", "wrong"])
def test_probes_need_no_token(token: str) -> None:
    for route, said in (("/health", {"status": "ok"}), ("/ping", {"status": "ok"}), ("/version", {"version": VERSION})):
        response = ask(SayingEngine(), route, b"", method="GET", token=token)
        assert (response.status_code, response.json()) == (200, said)


def test_token_with_another_scheme_is_refused() -> None:
    async def come(given: str) -> httpx.Response:
        async with running(SayingEngine()) as application, client_of(application) as client:
            return await client.post(COMPLETIONS, json=BODY, headers={"Authorization": given})

    for given, status in ((f"Basic {TOKEN}", 401), (TOKEN, 401), (f"bearer {TOKEN}", 200)):
        assert asyncio.run(come(given)).status_code == status, given


def test_too_large_body_is_not_read() -> None:
    """Checked with and without a Content-Length."""
    taken = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal taken
        while taken < 1000:
            taken += 1
            yield b" " * 1000

    async def send(**how: Any) -> httpx.Response:
        limits = ServerLimits(body_bytes=10_000)
        async with running(SayingEngine(), limits=limits) as application, client_of(application) as client:
            return await asyncio.wait_for(client.post(COMPLETIONS, **how), 60)

    for response in (
        asyncio.run(send(content=b" " * 10_001)),
        asyncio.run(send(content=b"", headers={"Content-Length": str(2**30)})),
        asyncio.run(send(content=endless())),
    ):
        assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"
    assert taken < 20


def test_request_that_would_wait_too_long_is_refused_and_accepted_later() -> None:
    async def crowd() -> None:
        engine = SayingEngine()
        engine.holds_at = 0
        async with running(engine, limits=ServerLimits(max_waiting=2)) as application, client_of(application) as client:
            waiting = [asyncio.create_task(client.post(COMPLETIONS, json=BODY)) for _ in range(2)]
            while application.thread.waiting < 2:
                await asyncio.sleep(0.001)
            turned_away = await client.post(COMPLETIONS, json=BODY)
            assert (turned_away.status_code, turned_away.json()["error"]["code"]) == (429, "engine_overloaded")
            assert turned_away.headers["retry-after"]
            engine.holds_at = None
            assert all(response.is_success for response in await asyncio.gather(*waiting))
            assert (await client.post(COMPLETIONS, json=BODY)).is_success
            assert application.thread.waiting == 0

    asyncio.run(asyncio.wait_for(crowd(), 60))


def test_idle_server_accepts_a_request_of_any_size() -> None:
    response = ask(SayingEngine(), COMPLETIONS, BODY | {"n": 5}, limits=ServerLimits(max_waiting=2))
    assert len(response.json()["choices"]) == 5


def test_closing_server_refuses_new_requests_and_finishes_open_ones() -> None:
    async def leave() -> None:
        engine = SayingEngine()
        engine.holds_at = 0
        async with running(engine) as application, client_of(application) as client:
            under_way = asyncio.create_task(client.post(COMPLETIONS, json=BODY))
            while not engine.running:
                await asyncio.sleep(0.001)
            application.guard.closing = True
            refused = await client.post(COMPLETIONS, json=BODY)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            assert refused.headers["connection"] == "close"
            engine.holds_at = None
            assert (await under_way).json()["choices"][0]["text"] == "hel"

    asyncio.run(asyncio.wait_for(leave(), 60))


def test_requests_that_are_cut_off_learn_it() -> None:
    async def cut() -> None:
        engine = SayingEngine()
        async with running(engine) as application, client_of(application) as client:
            engine.holds_at = 0
            under_way = asyncio.create_task(client.post(COMPLETIONS, json=BODY))
            while not engine.running:
                await asyncio.sleep(0.001)
            application.thread.stop("the server is shutting down")
            assert (await under_way).status_code == 503
            assert (await client.get("/health")).status_code == 503
            assert (await client.post(COMPLETIONS, json=BODY)).status_code == 503
        assert engine.running == 0

    asyncio.run(asyncio.wait_for(cut(), 60))


def test_load_counts_requests_rows_and_pages() -> None:
    load = ask(SayingEngine(), "/load", b"", method="GET").json()
    assert load == {
        "open_requests": 1, "running": 0, "waiting": 0, "free_pages": 64, "pages": 64, "preemptions": 0,
    }  # fmt: skip
