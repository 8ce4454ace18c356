"""Checks of every request before its body is read, and the server's metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Any

import httpx
import pytest
from server_helpers import TOKEN, SayingEngine, ask, client_of, running

from megatron_rl.generate.serving.access import Allowance, ServerLimits

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "x", "max_tokens": 3}
VERSION = version("mrl")
ROUTES = ["/v1/models", "/metrics", COMPLETIONS, "/nothing"]


@pytest.mark.parametrize("route", ROUTES)
def test_nothing_is_revealed_without_the_token(route: str) -> None:
    for token in ("", TOKEN[:-1], TOKEN + "x"):
        response = ask(SayingEngine(), route, b"x" * 10**6, token=token)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert TOKEN not in response.text


@pytest.mark.parametrize("token", ["", "wrong"])
def test_probes_need_no_token_and_metrics_need_none_on_demand(token: str) -> None:
    for route, said in (("/health", {"status": "ok"}), ("/ping", {"status": "ok"}), ("/version", {"version": VERSION})):
        limits = ServerLimits(requests_per_minute=1)
        response = ask(SayingEngine(), route, b"", method="GET", token=token, limits=limits)
        assert (response.status_code, response.json()) == (200, said)
    found = ask(SayingEngine(), "/metrics", b"", method="GET", token=token, limits=ServerLimits(open_metrics=True))
    assert found.status_code == 200 and "mrl_open_requests" in found.text
    assert ask(SayingEngine(), "/metrics", b"", method="GET", token=token).status_code == 401


def test_any_of_several_tokens_gives_access() -> None:
    for token in (TOKEN, "another-of-the-tests"):
        assert ask(SayingEngine(), COMPLETIONS, BODY, token=token, tokens=[TOKEN, "another-of-the-tests"]).is_success


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


def test_token_has_a_rate_limit() -> None:
    now = 0.0
    allowance = Allowance(2, clock=lambda: now)
    assert [allowance.take() for _ in range(3)] == [0, 0, 30]
    now = 45
    assert [allowance.take() for _ in range(2)] == [0, 15]
    now = 10**6
    assert [allowance.take() for _ in range(3)] == [0, 0, 30], "unused requests are not saved up"

    async def many() -> list[httpx.Response]:
        limits = ServerLimits(requests_per_minute=2)
        options: dict[str, Any] = {"limits": limits, "tokens": [TOKEN, "another-of-the-tests"]}
        async with (
            running(SayingEngine(), **options) as application,
            client_of(application) as one,
            client_of(application, "another-of-the-tests") as other,
        ):
            return [await client.post(COMPLETIONS, json=BODY) for client in (one, one, one, other)]

    *_, third, fourth = asyncio.run(many())
    assert (third.status_code, third.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(third.headers["retry-after"]) > 0
    assert fourth.is_success


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


def test_prometheus_gets_metrics_of_requests_tokens_and_engine() -> None:
    async def told() -> str:
        async with running(SayingEngine()) as application, client_of(application) as client:
            await client.post(COMPLETIONS, json=BODY)
            await client.post(COMPLETIONS, json=BODY | {"stream": True})
            await client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 0})
            await client.get("/no/such/route")
            return (await client.get("/metrics")).text

    lines = asyncio.run(told()).splitlines()
    for line in (
        'mrl_requests_total{route="/v1/completions",status="200"} 2.0',
        'mrl_requests_total{route="/v1/completions",status="400"} 1.0',
        'mrl_requests_total{route="other",status="404"} 1.0',
        "mrl_open_requests 1.0",
        "mrl_prompt_tokens_total 2.0",
        "mrl_generated_tokens_total 6.0",
        "mrl_answer_seconds_count 2.0",
        "mrl_time_to_first_token_seconds_count 1.0",
        "mrl_time_per_output_token_seconds_count 1.0",
        "mrl_engine_running 0.0",
        "mrl_engine_waiting 0.0",
        "mrl_engine_pages 64.0",
        "mrl_engine_free_pages 64.0",
    ):
        assert line in lines
