"""Servers answer bytes of strangers by an error of the client or by closing the connection: with nothing else in their
log, and ready for the next request."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import scripted_replica
from endpoint_helpers import opened
from examples import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from optional import needs
from raw_http import CLOSE, Asked, hostile_requests, on_a_socket, reply_to, spoilt_request
from scripted_replica import DIGEST, ScriptedEngine, ScriptedWeights
from server_helpers import TOKEN, SayingEngine, byte_tokenizer, running

from megatron_rl.agent.api import build_environment
from megatron_rl.agent.server.agent.agent_service import AgentService
from megatron_rl.agent.server.agent.agent_service import application as agent_application
from megatron_rl.contract.attempt_records import ReplicaAddress
from megatron_rl.contract.paths import RunDir
from megatron_rl.generate.engine.interface import TokenScore
from megatron_rl.generate.replica.app import ReplicaService
from megatron_rl.generate.replica.leader import Leader, LedEngineThread
from megatron_rl.generate.replica.scoring_service import ScoringService
from megatron_rl.generate.replicas.wire import PROTOCOL
from megatron_rl.generate.serving.connections import FIRST_OF_MANY, LOGGED_EVERY_S, FirstOfMany
from megatron_rl.rank.activity import Activity
from megatron_rl.recipe.environment_section import EnvironmentConfig

pytestmark = needs("transformers", "openai")

ADDRESS = ReplicaAddress(0, 0, "", 0, 1, DIGEST, PROTOCOL, 0.0)
COMPLETION = b'{"prompt":"x","max_tokens":3}'
REPLICA = RunDir("/nonexistent").attempt(1).replica(0)

OPEN = {"HTTP/0.9", "a length of 20 digits", "a body that ends early", "a head that ends early"}
COMPLETE = hostile_requests(Asked(b"", b"", b"")).keys() - OPEN
"""Requests after which a server expects nothing more. After others it waits until its patience ends, unless the client
ends its side of the connection."""

Serving = Callable[[], AbstractAsyncContextManager[tuple[int, Asked]]]
"""Context of a server: its port, and a good request."""


@asynccontextmanager
async def openai_server() -> AsyncIterator[tuple[int, Asked]]:
    async with running(SayingEngine()) as application, on_a_socket(application) as port:
        yield port, Asked(b"/v1/completions", TOKEN.encode(), COMPLETION)


@asynccontextmanager
async def endpoint() -> AsyncIterator[tuple[int, Asked]]:
    async with opened(max_calls=10**6, max_branches=10**6, max_tokens=10**9) as one:
        port = int(one.session.base_url.split("/")[2].rpartition(":")[2])
        yield port, Asked(b"/v1/completions", one.session.api_key.encode(), COMPLETION)


@asynccontextmanager
async def replica() -> AsyncIterator[tuple[int, Asked]]:
    engine = ScriptedEngine()
    led = LedEngineThread(Leader(engine, ScriptedWeights(engine), None, Activity(REPLICA, published=False)))
    service = ReplicaService(led, ADDRESS, scripted_replica.TOKEN)
    hello = json.dumps({"protocol": PROTOCOL, "digest": DIGEST, "driver": 1}).encode()
    async with led.running(), on_a_socket(service.app) as port:
        yield port, Asked(b"/hello", scripted_replica.TOKEN.encode(), hello)


@asynccontextmanager
async def teacher() -> AsyncIterator[tuple[int, Asked]]:
    async def score(tokens: list[int], top: int) -> list[TokenScore]:
        return [TokenScore(-1.0, [], [])] * (len(tokens) - 1)

    scorer: Any = SimpleNamespace(score=score)
    service = ScoringService(scorer, REPLICA, ADDRESS, scripted_replica.TOKEN)
    async with on_a_socket(service.app) as port:
        yield port, Asked(b"/v1/completions", scripted_replica.TOKEN.encode(), b'{"prompt":[1,2],"prompt_logprobs":0}')


@asynccontextmanager
async def agent_server() -> AsyncIterator[tuple[int, Asked]]:
    environment = build_environment(EnvironmentConfig(name="arithmetic"), byte_tokenizer())
    app = agent_application(AgentService("arithmetic", environment), [TOKEN])
    async with on_a_socket(app) as port:
        yield port, Asked(b"/sessions/x/answers", TOKEN.encode(), b'{"answers":{}}')  # there is no such session


GOOD = {openai_server: 200, endpoint: 200, replica: 200, teacher: 200, agent_server: 404}


async def is_refused(port: int, asked: Asked, name: Any, pieces: list[bytes]) -> None:
    for half in (False, True):
        reply = await reply_to(port, pieces, half=half) if half or name in COMPLETE else b""
        statuses = [int(each) for each in re.findall(rb"HTTP/1\.[01] (\d+)", reply)]
        assert all(100 <= status < 500 for status in statuses), (name, reply)
        assert b"Traceback" not in reply and len(reply) < 20_000, (name, reply)


async def attacked(serving: Serving, requests: Callable[[Asked], dict[Any, list[bytes]]]) -> None:
    async with serving() as (port, asked):
        await asyncio.gather(*(is_refused(port, asked, *each) for each in requests(asked).items()))
        good = await reply_to(port, [asked.sent(asked.length + CLOSE)])
        assert good.startswith(b"HTTP/1.1 %d " % GOOD[serving]), good


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    FIRST_OF_MANY.forget()
    caplog.set_level(logging.WARNING)
    return caplog


@pytest.mark.parametrize("serving", GOOD, ids=lambda each: each.__name__)
def test_requests_of_strangers(serving: Serving, log: pytest.LogCaptureFixture) -> None:
    asyncio.run(asyncio.wait_for(attacked(serving, hostile_requests), 60))
    check_log(log, 1)


@pytest.mark.parametrize("serving", [openai_server, replica, teacher, agent_server], ids=lambda each: each.__name__)
def test_a_body_beyond_the_limit_is_refused_unread(serving: Serving) -> None:
    """The policy's endpoint reads a part of it first, because its clients would miss the answer otherwise."""

    async def answered() -> bytes:
        async with serving() as (port, asked):
            return await reply_to(port, [asked.sent(b"Content-Length: %d\r\n" % 2**40, b"{")])

    assert asyncio.run(asyncio.wait_for(answered(), 30)).startswith(b"HTTP/1.1 413 ")


@examples(1, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([*GOOD]), st.integers(0, 2**32))
def test_spoilt_requests_of_strangers(log: pytest.LogCaptureFixture, serving: Serving, seed: int) -> None:
    random = Random(seed)
    asyncio.run(attacked(serving, lambda asked: {number: spoilt_request(asked, random) for number in range(100)}))
    check_log(log, 0)


def check_log(log: pytest.LogCaptureFixture, fewest: int) -> None:
    """Check that a log has no traceback, and of each kind of bad requests one line."""
    said = [record.getMessage() for record in log.records]
    assert fewest <= said.count("Invalid HTTP request received.") <= 1 and len(said) <= 3, said
    assert not any(record.exc_info for record in log.records), log.text


def test_a_fault_of_requests_is_one_line_and_then_a_count_each_hour() -> None:
    now = 0.0
    few = FirstOfMany(lambda: now)

    def said(message: str, error: Exception | None = None, level: int = logging.WARNING) -> str | None:
        trace = None if error is None else (type(error), error, error.__traceback__)
        record = logging.LogRecord("uvicorn.error", level, "", 0, message, (), trace)
        return record.getMessage() if few.filter(record) else None

    assert [said("bad") for _ in range(1000)] == ["bad"] + [None] * 999
    assert said("other") == "other"
    assert said("failed", ValueError()) == "failed" and said("failed", ValueError()) is None
    assert said("failed", KeyError()) == "failed", "another error is another fault"
    assert [said("started", level=logging.INFO) for _ in range(2)] == ["started"] * 2
    now = LOGGED_EVERY_S
    assert said("bad") == "bad (999 more in 60 minutes)"
    assert said("bad") is None
