"""A judging model: its verdict is parsed, and an answer without verdict is lost, not wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import httpx
import pytest
from pydantic import ValidationError

from megatron_rl.agent.environments.judge import Judge, JudgeConfig, JudgedEnvironment
from megatron_rl.agent.scoring import NotJudged
from megatron_rl.recipe.errors import ConfigurationError

CONFIG = JudgeConfig(url="http://judge/v1", model="wise", token_variable="JUDGE_TOKEN")


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "a-token")


async def no_pause(_: float) -> None:
    pass


def judged(handler: Callable[[httpx.Request], httpx.Response], config: JudgeConfig = CONFIG) -> float:
    judge = Judge(config, transport=httpx.MockTransport(handler), sleep=no_pause)
    return asyncio.run(judge.score("1+1?", "It is {two}.", "2"))


def saying(text: str) -> Callable[[httpx.Request], httpx.Response]:
    return lambda _: httpx.Response(200, json={"choices": [{"message": {"content": text}}]})


def test_request_has_openai_format_and_the_token() -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return saying("Right.\nVERDICT: 9")(request)

    assert judged(handler) == pytest.approx(0.9)
    [request] = seen
    assert str(request.url) == "http://judge/v1/chat/completions"
    assert request.headers["authorization"] == "Bearer a-token"
    body = json.loads(request.content)
    assert (body["model"], body["temperature"]) == ("wise", 0)
    assert "It is {two}." in body["messages"][0]["content"]


def test_last_verdict_counts() -> None:
    for text, reward in [
        ("VERDICT: 3\nno,\nVERDICT: 10", 1.0),
        ("VERDICT: 2.5", 0.25),
        ("verdict: 7", 0.7),
        ("**VERDICT:** 7", 0.7),
        ("**VERDICT: 7**", 0.7),
        ("VERDICT: **7**", 0.7),
        ("VERDICT: [7]", 0.7),
        ("VERDICT: $7$", 0.7),
        (r"VERDICT: \boxed{7}", 0.7),
        ("VERDICT: 7/10", 0.7),
        ("VERDICT: 7 out of 10", 0.7),
        ("VERDICT = 7", 0.7),
        ("The verdict is 7.", 0.7),
        ("## Verdict\n\nVERDICT: 7\n", 0.7),
        ('{"reason": "close", "verdict": 7}', 0.7),
        ("I end with VERDICT: and a number.\nVERDICT: 7", 0.7),
        ("VERDICT: 7\n(the verdict is final)", 0.7),
    ]:
        assert judged(saying(text)) == pytest.approx(reward), (text, reward)


def test_fields_set_to_null_are_not_sent() -> None:
    bodies: list[dict[str, object]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return saying("VERDICT: 9")(request)

    judged(handler)
    judged(handler, CONFIG.model_copy(update={"max_tokens": None, "temperature": None}))
    judged(handler, CONFIG.model_copy(update={"max_tokens": 10, "temperature": 0.6}))
    sent = [{name: body[name] for name in ("max_tokens", "temperature") if name in body} for body in bodies]
    assert sent == [{"max_tokens": 1024, "temperature": 0.0}, {}, {"max_tokens": 10, "temperature": 0.6}]


@pytest.mark.parametrize(
    ("handler", "why"),
    [
        (saying("I like it"), "reply has no VERDICT"),
        (saying("VERDICT: 11"), "not between 0 and 10"),
        (saying("VERDICT: -1"), "not between 0 and 10"),
        (saying("VERDICT: 3/5"), "out of 5, not out of 10"),
        (saying("VERDICT: 7-8"), "reply has no VERDICT"),
        (saying("VERDICT: and a number from 0 to 10"), "reply has no VERDICT"),
        (saying("The verdict of 10 jurors"), "reply has no VERDICT"),
        (lambda _: httpx.Response(200, json={"choices": []}), "no chat completion"),
        (lambda _: httpx.Response(200, content=b"hm"), "no chat completion"),
        (lambda _: httpx.Response(401), "HTTP 401"),
    ],
)
def test_answer_without_verdict_is_lost(handler: Callable[[httpx.Request], httpx.Response], why: str) -> None:
    with pytest.raises(NotJudged, match=why):
        judged(handler)


def test_busy_judge_is_retried() -> None:
    answers = iter([httpx.Response(429), httpx.Response(503), saying("VERDICT: 5")(httpx.Request("GET", "http://x"))])
    assert judged(lambda _: next(answers)) == 0.5
    with pytest.raises(NotJudged, match="HTTP 503"):
        judged(lambda _: httpx.Response(503))


def test_invalid_judge_is_an_error_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValidationError, match=r"must contain \{response\}"):
        JudgeConfig(url="http://judge/v1", model="wise", prompt="{question}")
    monkeypatch.delenv("JUDGE_TOKEN")
    with pytest.raises(ConfigurationError, match="JUDGE_TOKEN"):
        Judge(CONFIG)


def test_connections_close_with_the_environment() -> None:
    judge = Judge(CONFIG, transport=httpx.MockTransport(saying("VERDICT: 5")))
    environment = object.__new__(JudgedEnvironment)
    environment._judge = judge

    async def ask_twice() -> list[bool]:
        await judge.score("1+1?", "2", "2")
        client, _ = judge._client()
        await environment.close()
        closed = client.is_closed
        await environment.close()  # nothing is open
        return [closed, await judge.score("1+1?", "2", "2") == 0.5]

    assert asyncio.run(ask_twice()) == [True, True]
