"""Requests go to the server with the least to do, and to another one if it is away."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from megatron_rl.inference.api import GenerationRequest, Unsupported
from megatron_rl.inference.config import Sampling
from megatron_rl.inference.openai import EndpointAway, EndpointError
from megatron_rl.inference.openai_bodies import Endpoint
from megatron_rl.inference.served import ServedPolicy, inference_of
from megatron_rl.model.tokenizer import CharacterTokenizer

TOKENIZER = CharacterTokenizer("0123456789")


def ask(tokens: int = 2, key: int = 0, **sampling: Any) -> GenerationRequest:
    return GenerationRequest([1], 1, Sampling(max_new_tokens=tokens, **sampling), key)


def answer(version: int | None = None) -> httpx.Response:
    choice = {"index": 0, "token_ids": [3, 10], "logprobs": {"token_logprobs": [-1.0, -2.0]}, "finish_reason": "stop"}
    return httpx.Response(200, json={"choices": [choice]})


class Servers:
    """Servers a and b, which answer when the test lets them."""

    def __init__(self, limit_s: float = 60.0) -> None:
        self.asked: list[str] = []
        self.status: dict[str, int] = {}
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.slept: list[float] = []
        endpoints = [Endpoint(f"http://{name}/v1", "policy", "vllm", attempts=1) for name in "ab"]
        transport = httpx.MockTransport(self._reply)
        self.policy = ServedPolicy(endpoints, TOKENIZER, limit_s, transport=transport, sleep=self._sleep)

    async def _reply(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.host)
        if (status := self.status.get(request.url.host)) is not None:
            return httpx.Response(status, text="no")
        await self.may_answer.wait()
        return answer()

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(seconds)


def test_a_request_goes_to_the_server_with_the_fewest_outstanding_tokens() -> None:
    async def run() -> list[str]:
        servers = Servers()
        servers.may_answer.clear()
        tasks = []
        for tokens in (10, 3, 3, 9):
            tasks.append(asyncio.ensure_future(servers.policy.generate(ask(tokens))))
            await asyncio.sleep(0.01)
        servers.may_answer.set()
        await asyncio.gather(*tasks)
        await servers.policy.generate(ask())
        return servers.asked

    assert asyncio.run(run()) == ["a", "b", "b", "b", "a"]


def test_requests_wait_for_servers_that_appear_and_follow_their_changes() -> None:
    async def run() -> list[str]:
        servers = Servers()
        a, b = (Endpoint(f"http://{name}/v1", "policy", "vllm", attempts=1) for name in "ab")
        servers.policy.use([])
        waiting = asyncio.ensure_future(servers.policy.generate(ask()))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        servers.policy.use([b])
        await waiting
        servers.status["b"] = 503
        servers.policy.use([a, b])
        await asyncio.gather(*(servers.policy.generate(ask()) for _ in range(2)))
        servers.policy.use([a])
        await servers.policy.generate(ask())
        return servers.asked

    asked = asyncio.run(run())
    assert asked[0] == "b" and asked[-1] == "a" and asked.count("a") == 3


def test_a_request_without_any_server_fails_after_the_limit() -> None:
    async def run() -> None:
        servers = Servers(limit_s=0.1)
        servers.policy.use([])
        await servers.policy.generate(ask())

    with pytest.raises(EndpointAway, match="no server was there"):
        asyncio.run(run())


def test_a_request_goes_elsewhere_if_a_server_is_away_and_returns_to_it_later() -> None:
    async def run() -> Servers:
        servers = Servers()
        servers.status["a"] = 503
        for _ in range(3):
            (one,) = await servers.policy.generate(ask())
            assert one.tokens == [3, 10]
        assert servers.asked == ["a", "b", "b", "b"]
        servers.status.clear()
        servers.policy._servers[0].away_until = 0.0
        await servers.policy.generate(ask())
        return servers

    servers = asyncio.run(run())
    assert servers.asked[-1] == "a" and not servers.slept


def test_requests_wait_until_a_server_answers_and_fail_after_the_limit() -> None:
    async def run() -> Servers:
        servers = Servers(limit_s=0.8)
        servers.status = {"a": 503, "b": 503}
        with pytest.raises(EndpointAway, match="HTTP 503"):
            await servers.policy.generate(ask())
        return servers

    servers = asyncio.run(run())
    assert {*servers.asked[:2]} == {"a", "b"} and servers.slept


def test_a_refused_request_is_not_repeated() -> None:
    async def run() -> Servers:
        servers = Servers()
        servers.status = {"a": 422}
        with pytest.raises(EndpointError, match="HTTP 422"):
            await servers.policy.generate(ask())
        return servers

    assert asyncio.run(run()).asked == ["a"]


def test_all_servers_have_one_policy_version() -> None:
    async def run() -> list[int]:
        servers = Servers()
        servers.policy.policy_version = 7
        return [*(await servers.policy.generate(ask()))[0].versions, servers.policy.policy_version]

    assert asyncio.run(run()) == [7, 7, 7]


class SGLang:
    """Replies to one request as SGLang does."""

    def __init__(self, reply: Any) -> None:
        self.asked: list[tuple[str, Any]] = []
        self._reply = reply
        endpoint = Endpoint("http://a/v1", "policy", "sglang", attempts=1)
        self.inference = inference_of(endpoint, TOKENIZER, httpx.MockTransport(self._answer))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append((request.url.path, json.loads(request.content)))
        return httpx.Response(200, json=self._reply)


def meta(reason: Any, *logprobs: tuple[float, int]) -> dict[str, Any]:
    found = [[logprob, token, None] for logprob, token in logprobs]
    return {"text": "", "meta_info": {"finish_reason": reason, "output_token_logprobs": found}}


def test_sglang_is_asked_by_its_own_api_with_every_sampling_field() -> None:
    ended = meta({"type": "stop", "matched": 10}, (-1.0, 3), (-2.0, 10))
    cut = meta({"type": "length", "length": 1}, (-0.5, 4))
    server = SGLang([ended, cut])
    server.inference.policy_version = 5
    request = GenerationRequest([1, 2], 2, Sampling(max_new_tokens=3, temperature=0.7, stop=("x",)), key=9)
    first, second = asyncio.run(server.inference.generate(request))
    assert (first.tokens, first.logprobs, first.finish_reason) == ([3, 10], [-1.0, -2.0], "stop")
    assert (second.tokens, second.finish_reason, second.versions) == ([4], "length", [5])
    ((path, body),) = server.asked
    assert path == "/generate"
    assert (body["input_ids"], body["return_logprob"]) == ([1, 2], True)
    params = body["sampling_params"]
    assert (params["n"], params["max_new_tokens"], params["temperature"], params["stop"]) == (2, 3, 0.7, ["x"])
    neutral = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "min_new_tokens": 0, "repetition_penalty": 1.0}
    neutral |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert {name: params[name] for name in neutral} == neutral


def test_sglang_reports_the_log_probs_of_a_text() -> None:
    server = SGLang({"meta_info": {"input_token_logprobs": [[None, 1, None], [-1.5, 2, None]]}})
    assert asyncio.run(server.inference.score([1, 2])) == [-1.5]


def test_sglang_is_not_asked_for_what_its_log_probs_leave_out() -> None:
    with pytest.raises(Unsupported, match=r"sampling\.min_new_tokens"):
        asyncio.run(SGLang({}).inference.generate(ask(min_new_tokens=1)))
