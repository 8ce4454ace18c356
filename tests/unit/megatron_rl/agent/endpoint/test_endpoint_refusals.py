"""Refusals of the endpoint, each in the form of OpenAI's errors, and the limits of a rollout."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import pytest
from endpoint_helpers import SAMPLING, USER, Opened, with_session

from megatron_rl.agent.scoring import CheckedReward
from megatron_rl.generate.engine.interface import Completion, GenerationRequest
from megatron_rl.model.tokenizer import CharacterTokenizer


async def ask(one: Opened, url: str = "completions", **body: Any) -> tuple[int, str | None]:
    """Return status and code of the error."""
    response = await one.http.post(url, json={"prompt": "x"} | body)
    return response.status_code, response.json().get("error", {}).get("code")


def test_key_that_is_no_sessions_is_refused() -> None:
    async def program(one: Opened) -> None:
        root = one.session.base_url.partition("/sessions/")[0]
        bearer = {"Authorization": f"Bearer {'x' * 43}"}
        for url, headers in (
            (f"{root}/sessions/{'x' * 43}/v1/completions", {}),
            (f"{root}/v1/completions", bearer),
            (f"{root}/v1/completions", {}),
            (f"{root}/v1/completions", {"Authorization": one.session.api_key}),
        ):
            response = await one.http.post(url, json={"prompt": "x"}, headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        assert one.session.calls == 0

    with_session(program)


def test_call_after_the_end_of_its_session_is_refused() -> None:
    async def program(one: Opened) -> None:
        async with one.endpoint.session(one.engine, SAMPLING, 2, None) as other:
            pass
        assert await ask(one, f"{other.base_url}/completions") == (410, "session_ended")
        assert not one.engine.requests

    with_session(program)


class Unanswering:
    """An engine that never answers."""

    def __init__(self) -> None:
        self.asked, self.cancelled = asyncio.Event(), 0

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled += 1
        raise AssertionError("unreachable")


def test_call_under_way_is_cancelled_by_the_end_of_its_session() -> None:
    async def program(one: Opened) -> None:
        async with one.endpoint.session(one.engine, SAMPLING, 2, None) as other:
            asked = asyncio.ensure_future(ask(one, f"{other.base_url}/completions"))
            await one.engine.asked.wait()
        assert await asked == (410, "session_ended")
        assert one.engine.cancelled == 1

    with_session(program, engine=Unanswering())


def test_call_of_a_client_that_leaves_is_cancelled() -> None:
    async def program(one: Opened) -> None:
        with pytest.raises(httpx.ReadTimeout):
            await one.http.post("completions", json={"prompt": "x"}, timeout=0.2)
        async with asyncio.timeout(5):
            while not one.engine.cancelled:
                await asyncio.sleep(0.01)

    with_session(program, engine=Unanswering())


def test_unknown_model_is_refused() -> None:
    async def program(one: Opened) -> None:
        generate = one.session.base_url.removesuffix("/v1") + "/inference/v1/generate"
        for url, body in (
            ("completions", {}),
            ("chat/completions", {"messages": [USER], "prompt": None}),
            (generate, {"token_ids": [1]}),
        ):
            assert await ask(one, url, model="gpt-5", **body) == (404, "model_not_found")
        assert (await one.http.get("models/gpt-5")).status_code == 404

    with_session(program)


def test_unknown_url_is_refused_without_the_key_in_the_message() -> None:
    async def program(one: Opened) -> None:
        response = await one.http.post("embeddings", json={})
        assert response.json()["error"]["message"] == "POST /v1/embeddings: Not Found"

    with_session(program)


def test_body_of_10_mb_is_refused() -> None:
    async def program(one: Opened) -> None:
        response = await one.http.post("completions", content=b'{"prompt": "' + b"x" * 10_000_000 + b'"}')
        assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")

    with_session(program)


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"prompt": 1}', b'{"prompt": ""}', b'{"prompt": "x", "n": 0}'])
def test_body_that_is_no_request_is_refused(body: bytes) -> None:
    async def program(one: Opened) -> None:
        for url in ("completions", "chat/completions", one.session.base_url[:-3] + "/inference/v1/generate"):
            response = await one.http.post(url, content=body)
            assert response.status_code == 400 and response.json()["error"]["message"]

    with_session(program)


def test_chat_without_a_chat_template_is_refused() -> None:
    async def program(one: Opened) -> None:
        assert await ask(one, "chat/completions", prompt=None, messages=[USER]) == (400, "no_chat_template")

    with_session(program, tokenizer=CharacterTokenizer("xhelo"))


def test_calls_beyond_the_limit_lose_the_rollout() -> None:
    async def program(one: Opened) -> None:
        for expected in ((200, None), (200, None), (403, "limit_exceeded"), (403, "limit_exceeded")):
            assert await ask(one) == expected
        assert one.session.stopped.is_set()
        assert one.session.failure == "more than 2 calls (environment.args.max_calls)"
        with pytest.raises(ValueError, match="more than 2 calls"):
            one.session.trajectory(CheckedReward(1.0, {}))

    with_session(program, max_calls=2)


def test_branches_beyond_the_limit_lose_the_rollout() -> None:
    async def program(one: Opened) -> None:
        async def chat(*messages: Any, n: int = 1) -> Any:
            response = await one.http.post("chat/completions", json={"messages": [*messages], "n": n})
            return response.json().get("choices", [{}])[0].get("message")

        answer = await chat(USER, n=2)
        assert await chat(USER, answer, USER) and one.session.failure is None  # continues a branch
        assert await chat(USER, answer, {**USER, "content": "another"}) and one.session.failure is None  # the other one
        assert await chat(USER) is None
        assert one.session.failure == "more than 2 branches (environment.args.max_branches)"

    with_session(program, max_branches=2)


def test_parallel_calls_count_their_branches_before_they_are_answered() -> None:
    async def program(one: Opened) -> None:
        found = await asyncio.gather(*(ask(one) for _ in range(5)))
        assert sorted(found, key=str) == [(200, None)] * 3 + [(403, "limit_exceeded")] * 2

    with_session(program, max_branches=3)


def test_tokens_beyond_the_limit_lose_the_rollout() -> None:
    async def program(one: Opened) -> None:
        response = await one.http.post("completions", json={"prompt": [1, 2, 3]})
        assert response.json()["choices"][0]["text"] == "hello"
        response = await one.http.post("completions", json={"prompt": [1, 2, 3]})
        assert response.json()["choices"][0]["text"] == "he", "the answer gets the room that is left"
        assert await ask(one) == (403, "limit_exceeded")
        assert one.session.failure == "more than 14 tokens (environment.args.max_tokens)"

    with_session(program, max_tokens=3 + 6 + 3 + 2)


class Failing:
    """An engine that has failed."""

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        raise RuntimeError("the device is lost")


def test_failure_of_the_engine_is_not_the_programs() -> None:
    async def program(one: Opened) -> None:
        assert await ask(one) == (500, "engine_failed")
        assert str(one.session.broken) == "the device is lost" and one.session.stopped.is_set()

    with_session(program, engine=Failing())


def test_no_log_contains_the_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def program(one: Opened) -> str:
        await ask(one)
        await ask(one, "nowhere")
        await ask(one, model="gpt-5")
        return one.session.api_key

    key = with_session(program)
    ours = [record for record in caplog.records if not record.name.startswith(("httpx", "httpcore", "openai"))]
    assert not any(key in record.getMessage() for record in ours)
