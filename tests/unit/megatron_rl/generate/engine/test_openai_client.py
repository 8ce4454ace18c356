"""Log-probs of texts by servers: which server gets a text, what it is asked, and their errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from core_helpers import ALPHABET, END, full_forward, tiny_model, tiny_policy
from server_helpers import running

from megatron_rl.generate.engine.engine import Engine
from megatron_rl.generate.engine.interface import TokenScore
from megatron_rl.generate.engine.openai import Endpoint, EndpointAway, EndpointError, ScoringServers
from megatron_rl.model.tokenizer import CharacterTokenizer
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.inference import InferenceConfig

A, B = (Endpoint(f"http://{name}/v1", "tiny") for name in "ab")
TEXT = [1, 2]


def scored(*logprobs: float) -> httpx.Response:
    found = [{str(TEXT[1]): {"logprob": value}} for value in logprobs]
    return httpx.Response(200, json={"choices": [{"index": 0, "prompt_logprobs": [None, *found]}]})


class Servers:
    """Servers a and b, which answer when the test lets them."""

    def __init__(self, *endpoints: Endpoint, limit_s: float = 60.0) -> None:
        self.asked: list[str] = []
        self.status: dict[str, int] = {}
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.slept: list[float] = []
        transport = httpx.MockTransport(self._reply)
        self.pool = ScoringServers(endpoints or (A, B), limit_s, transport=transport, sleep=self._sleep)

    async def _reply(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.host)
        if (status := self.status.get(request.url.host)) is not None:
            return httpx.Response(status, text="no")
        await self.may_answer.wait()
        tokens = json.loads(request.content)["prompt"]
        return scored(*[-1.0] * (len(tokens) - 1))

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(seconds)


def test_a_text_goes_to_the_server_with_the_fewest_outstanding_tokens() -> None:
    async def run() -> list[str]:
        servers = Servers()
        servers.may_answer.clear()
        tasks = []
        for length in (11, 4, 4, 10):
            tasks.append(asyncio.ensure_future(servers.pool.score([2] * length)))
            await asyncio.sleep(0.01)
        servers.may_answer.set()
        await asyncio.gather(*tasks)
        await servers.pool.score(TEXT)
        return servers.asked

    assert asyncio.run(run()) == ["a", "b", "b", "b", "a"]


def test_texts_wait_for_servers_that_appear_and_follow_their_changes() -> None:
    async def run() -> list[str]:
        servers = Servers()
        servers.pool.use([])
        waiting = asyncio.ensure_future(servers.pool.score(TEXT))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        servers.pool.use([B])
        await waiting
        servers.status["b"] = 503
        servers.pool.use([A, B])
        await asyncio.gather(*(servers.pool.score(TEXT) for _ in range(2)))
        servers.pool.use([A])
        await servers.pool.score(TEXT)
        return servers.asked

    asked = asyncio.run(run())
    assert asked[0] == "b" and asked[-1] == "a" and asked.count("a") == 3


def test_a_text_without_any_server_fails_after_the_limit() -> None:
    async def run() -> None:
        servers = Servers(limit_s=0.1)
        servers.pool.use([])
        await servers.pool.score(TEXT)

    with pytest.raises(EndpointAway, match="no server was there"):
        asyncio.run(run())


def test_a_text_goes_elsewhere_if_a_server_is_away_and_returns_to_it_later() -> None:
    async def run() -> Servers:
        servers = Servers()
        servers.status["a"] = 503
        for _ in range(3):
            assert await servers.pool.score(TEXT) == [TokenScore(-1.0, [], [])]
        assert servers.asked == ["a", "b", "b", "b"]
        servers.status.clear()
        servers.pool._servers[0].away_until = 0.0
        await servers.pool.score(TEXT)
        return servers

    servers = asyncio.run(run())
    assert servers.asked[-1] == "a" and not servers.slept


def test_texts_wait_until_a_server_answers_and_fail_after_the_limit() -> None:
    async def run() -> Servers:
        servers = Servers(limit_s=0.8)
        servers.status = {"a": 503, "b": 503}
        with pytest.raises(EndpointAway, match="HTTP 503"):
            await servers.pool.score(TEXT)
        return servers

    servers = asyncio.run(run())
    assert {*servers.asked[:2]} == {"a", "b"} and servers.slept


def ask(reply: httpx.Response, endpoint: Endpoint = A) -> tuple[list[TokenScore], httpx.Request]:
    """Log-probs in a server's reply, and the request for them."""
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return reply

    pool = ScoringServers([endpoint], 0.0, transport=httpx.MockTransport(answer))
    found = asyncio.run(pool.score(TEXT))
    return found, *asked


def test_a_server_is_asked_for_log_probs_of_token_ids() -> None:
    found, request = ask(scored(-2.5))
    assert (found, request.url.path) == ([TokenScore(-2.5, [], [])], "/v1/completions")
    asked = json.loads(request.content)
    assert (asked["model"], asked["prompt"], asked["prompt_logprobs"]) == ("tiny", TEXT, 0)


@pytest.mark.parametrize(
    ("reply", "kind", "why"),
    [
        (httpx.Response(400, json={"error": {"message": "context length is 1"}}), EndpointError, "context length is 1"),
        (httpx.Response(400, json={"error": "no such thing"}), EndpointError, "HTTP 400: no such thing"),
        (httpx.Response(422, text="what"), EndpointError, "HTTP 422: what"),
        (httpx.Response(404, json={"error": {"message": "no 'tiny' here"}}), ConfigurationError, "name of its model"),
        (httpx.Response(401, text="who are you"), ConfigurationError, "no token is configured"),
        (httpx.Response(200, text="<html>"), EndpointError, "<html>"),
        (httpx.Response(200, json={"choices": []}), EndpointError, "log-probs of a prompt are missing"),
        (scored(), EndpointError, "log-probs of a prompt are missing"),
    ],
)
def test_other_errors_are_not_retried(reply: httpx.Response, kind: type[Exception], why: str) -> None:
    with pytest.raises(kind, match=why):
        ask(reply)


def test_token_comes_from_a_file_or_a_variable_and_is_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    monkeypatch.setenv("SOME_TOKEN", "0ther")
    for fields, expected in (
        ({"token_file": tmp_path / "token"}, "s3cret"),
        ({"token_variable": "SOME_TOKEN"}, "0ther"),
    ):
        endpoint = Endpoint("http://a/v1", "tiny", **fields)
        _, request = ask(scored(-1.0), endpoint)
        assert request.headers["Authorization"] == f"Bearer {expected}"
        assert expected not in repr(endpoint)


@pytest.mark.parametrize("write", [lambda path: None, lambda path: path.write_text("\n"), lambda path: path.mkdir()])
def test_unreadable_token_is_one_clear_error(tmp_path: Path, write: Callable[[Path], object]) -> None:
    write(tmp_path / "token")
    with pytest.raises(ConfigurationError, match="token"):
        ScoringServers([Endpoint("http://a/v1", "tiny", token_file=tmp_path / "token")], 1.0)


def test_mrl_serve_reports_the_log_probs_of_its_model(
    platform: Any, groups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "s3cret")
    model, tokenizer = tiny_model(), CharacterTokenizer(ALPHABET)
    policy = tiny_policy(platform, model)
    engine = Engine(policy, model, InferenceConfig(max_batch=2), {END}, decode=tokenizer.decode)

    async def score(text: list[int], name: str) -> list[TokenScore]:
        options = {"tokenizer": tokenizer, "max_length": model.max_position_embeddings, "tokens": ["s3cret"]}
        async with running(engine, **options) as application:
            transport = httpx.ASGITransport(application, raise_app_exceptions=False)
            endpoint = Endpoint("http://server/v1", name, token_variable="SOME_TOKEN")
            return await ScoringServers([endpoint], 1.0, transport=transport).score(text, 3)

    text = [1, 10, 2, 12, 5]
    logprobs = full_forward(policy, text)[:-1].float().log_softmax(-1)
    expected = [row[token].item() for row, token in zip(logprobs, text[1:], strict=True)]
    found = asyncio.run(score(text, "tiny"))
    assert [each.logprob for each in found] == pytest.approx(expected, abs=1e-5)
    best = logprobs.topk(3)
    assert [each.tokens for each in found] == best.indices.tolist()
    assert [each.logprobs for each in found] == [pytest.approx(each, abs=1e-5) for each in best.values.tolist()]
    with pytest.raises(ConfigurationError, match=r"there is no model 'policy' here: .* use the name"):
        asyncio.run(score(text, "policy"))
