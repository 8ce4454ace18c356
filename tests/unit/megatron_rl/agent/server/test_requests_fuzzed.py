"""Servers answer requests of any shape: never with a server's error, never with another request's answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import httpx
from endpoint_helpers import Opened, with_session
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from odd_values import as_json, changed, drawn, spoilt
from server_helpers import TOKEN, SayingEngine, byte_tokenizer, client_of, running

from megatron_rl.agent.api import build_environment
from megatron_rl.agent.remote.agent_wire import PROTOCOL
from megatron_rl.agent.server.agent import agent_service
from megatron_rl.agent.server.agent.agent_service import AgentService, application
from megatron_rl.generate.engine.interface import GenerationRequest
from megatron_rl.recipe.environment_section import EnvironmentConfig
from megatron_rl.recipe.inference import Sampling

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "4"},
]
SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "n": 2,
    "stop": ["x"],
    "seed": 1,
    "max_tokens": 4,
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
BODIES: dict[str, list[Any]] = {
    "completions": [
        {"model": "tiny", "prompt": "ask", **SAMPLING, "logprobs": 2, "echo": True, "prompt_logprobs": 1},
        {"prompt": [[1, 2], [3]], "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}},
    ],
    "chat/completions": [
        {"messages": TALK, "tools": [TOOL], "tool_choice": "auto", **SAMPLING, "logprobs": True, "top_logprobs": 2},
        {"messages": TALK[:2], "response_format": FORM, "max_completion_tokens": 9, "chat_template_kwargs": {"a": 1}},
        {"messages": TALK[:2], "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"prompt_token_ids": [1, 2], "stream": True, "max_tokens": 3, "reasoning_effort": "low"},
    ],
}
OF_ENDPOINT: dict[str, list[Any]] = {
    **BODIES,
    "responses": [
        {"model": "policy", "input": "hi", "instructions": "be", "temperature": 1, "stream": True, "store": True},
        {
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "4"},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
            "previous_response_id": None,
        },
    ],
    "../inference/v1/generate": [
        {"model": "policy", "token_ids": [1, 2], "sampling_params": {"temperature": 1.0, "n": 1, "max_tokens": 3}}
    ],
}
METHODS = ("POST", "POST", "POST", "POST", "POST", "GET", "PUT", "HEAD")
KINDS = ("application/json", "text/plain", "multipart/form-data; boundary=x", "application/json; charset=utf-7", "\\")


class Sent(NamedTuple):
    method: str
    route: str
    content: bytes
    headers: dict[str, str]


def sent_to(bodies: dict[str, list[Any]], random: Random) -> Sent:
    route = random.choice([*bodies])
    body = random.choice(bodies[route])
    content = spoilt(as_json(body), random) if random.randrange(4) == 0 else as_json(changed(body, random))
    headers = {"Content-Type": random.choice(KINDS)} if random.randrange(4) == 0 else {}
    if random.randrange(10) == 0:
        headers["Content-Encoding"] = random.choice(["gzip", "br", "x"])
    return Sent(random.choice(METHODS), route, content, headers)


def requests(bodies: dict[str, list[Any]]) -> st.SearchStrategy[list[Sent]]:
    return st.lists(drawn(lambda random: sent_to(bodies, random)), min_size=8, max_size=8)


def about(request: GenerationRequest, sample: int) -> str:
    """Answer that contains its prompt."""
    return f"{byte_tokenizer().decode(request.prompt_tokens)[-30:]}!"


async def tried(http: httpx.AsyncClient, some: Sequence[Sent]) -> None:
    """Send hostile requests, and among them good ones, which get their own answers."""

    async def send(one: Sent) -> None:
        method, route, content, headers = one
        response = await http.request(method, route, content=content, headers=headers)
        assert response.status_code < 500, (one, response.text)
        if not response.is_success and method != "HEAD":
            error = response.json()["error"]
            assert error["message"].strip() and len(response.content) < 5000, (one, response.text)

    async def good(number: int) -> None:
        response = await http.post("completions", json={"prompt": f"number {number}", "max_tokens": 30})
        assert response.json()["choices"][0]["text"].startswith(f"number {number}!"), response.text

    await asyncio.gather(*map(send, some), *map(good, range(3)))


@examples(4)
@given(requests(BODIES))
def test_server_answers_or_refuses_requests_of_any_shape(some: list[Sent]) -> None:
    async def run() -> None:
        async with running(SayingEngine(about)) as application, client_of(application) as http:
            http.base_url = httpx.URL("http://server/v1/")
            await asyncio.wait_for(tried(http, some), 60)

    asyncio.run(run())


@examples(4)
@given(requests(OF_ENDPOINT))
def test_endpoint_answers_or_refuses_requests_of_any_shape(some: list[Sent]) -> None:
    async def program(one: Opened) -> None:
        await tried(one.http, some)

    def answers(prompt: str, sample: int) -> str:
        return f"{prompt[-30:]}!"

    with_session(program, answers, max_calls=1000, max_branches=1000, max_tokens=10**6)


LIMITS = {"timeout_s": 60.0, "retries": 1, "rollout_s": 5.0}
SAMPLING_OF_RUN = Sampling(max_new_tokens=4).model_dump()
ROLLOUT = {"set": "training", "number": 0, "samples": 2, "sampling": SAMPLING_OF_RUN, "key": 7, "ordinal": 0}
COMPLETED = [[5], [-1.0], "stop", [0], None]


@cache
def arithmetic() -> AgentService:
    return AgentService("arithmetic", build_environment(EnvironmentConfig(name="arithmetic"), byte_tokenizer()))


def sent_to_agent(session: str, asked: str, random: Random) -> tuple[str, bytes]:
    begin = {"protocol": PROTOCOL, "digest": arithmetic().about.digest, "request": {**ROLLOUT, "limits": LIMITS}}
    bodies: dict[str, Any] = {
        "/rollouts": begin,
        f"/sessions/{session}/poll": {"known": [asked]},
        f"/sessions/{session}/answers": {
            "answers": {asked: random.choice([[COMPLETED], {"kind": "value", "message": ""}])}
        },
    }
    path = random.choice([*bodies])
    body = bodies[path]
    if random.randrange(4) == 0:
        return path, spoilt(as_json(body), random)
    if path == "/rollouts" and random.randrange(2):
        return path, as_json({**body, "request": changed(body["request"], random)})
    return path, as_json(changed(body, random))


@examples(4)
@given(st.integers(0, 2**32))
def test_agent_server_answers_or_refuses_requests_of_any_shape(seed: int) -> None:
    async def run() -> None:
        service, random = arithmetic(), Random(seed)
        transport = httpx.ASGITransport(application(service, [TOKEN]))
        headers = {"Authorization": f"Bearer {TOKEN}"}
        good = {"protocol": PROTOCOL, "digest": service.about.digest, "request": {**ROLLOUT, "limits": LIMITS}}
        async with httpx.AsyncClient(transport=transport, base_url="http://t", headers=headers) as http:
            opened = (await http.post("/rollouts", json=good)).json()["session"]
            (asked,) = (await http.post(f"/sessions/{opened}/poll", json={"known": []})).json()["asks"]
            for _ in range(8):
                path, content = sent_to_agent(opened, asked["id"], random)
                response = await http.post(path, content=content)
                assert response.status_code in (200, 400, 404, 409), (path, content, response.text)
        for each in [*service._sessions]:
            await service.end(each)

    with mock.patch.object(agent_service, "POLL_S", 0.01):
        asyncio.run(run())
