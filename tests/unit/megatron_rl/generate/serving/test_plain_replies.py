"""Servers that others run cannot fill the memory of a rank: a reply that is packed or too long is refused by name."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import httpx
import pytest

from megatron_rl.agent.environments.judged import scoring_server
from megatron_rl.agent.environments.judged.judged_arguments import JudgeConfig
from megatron_rl.agent.environments.judged.scoring_server import ScoringServer
from megatron_rl.agent.remote import agent_client
from megatron_rl.agent.remote.agent_client import AgentClient
from megatron_rl.agent.scoring import NotJudged
from megatron_rl.generate.engine import openai as openai_client
from megatron_rl.generate.engine.openai import Endpoint, ScoringServers

BLANKS = 2**24


async def packed() -> AsyncIterator[bytes]:
    """Spaces; each received byte stands for a thousand."""
    packer = zlib.compressobj(9, wbits=31)
    yield packer.compress(b" " * BLANKS) + packer.flush()


async def long() -> AsyncIterator[bytes]:
    for _ in range(8):
        yield b" " * 1024


async def no_pause(_: float) -> None:
    await asyncio.sleep(0)


def judge(server: httpx.MockTransport) -> Coroutine[Any, Any, Any]:
    config = JudgeConfig(url="http://judge/v1", model="wise")
    return ScoringServer(config, "http://judge/v1", "wise", transport=server, sleep=no_pause).ask(
        "chat/completions", {}, dict
    )


def teacher(server: httpx.MockTransport) -> Coroutine[Any, Any, Any]:
    return ScoringServers([Endpoint("http://teacher/v1", "wise")], 1.0, transport=server, sleep=no_pause).score([1, 2])


def agent(server: httpx.MockTransport) -> Coroutine[Any, Any, Any]:
    return AgentClient("http://agent", "token", 0.0, transport=server)._send("GET", "/about", None)


ASKS: dict[str, Callable[[httpx.MockTransport], Coroutine[Any, Any, Any]]] = {
    "judge": judge,
    "teacher": teacher,
    "agent": agent,
}


@pytest.mark.parametrize("name", ASKS)
@pytest.mark.parametrize(("encoding", "said"), [("gzip", "packed with 'gzip'"), ("", "more than 4,096 bytes")])
def test_it_is_refused_before_it_is_unpacked(
    name: str, encoding: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (scoring_server, openai_client, agent_client):
        monkeypatch.setattr(module, "LONGEST_BYTES", 4096)
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers["accept-encoding"])
        return httpx.Response(200, headers={"Content-Encoding": encoding}, content=packed() if encoding else long())

    with pytest.raises((RuntimeError, NotJudged), match=said):
        asyncio.run(ASKS[name](httpx.MockTransport(answer)))
    assert set(asked) == {"identity"}
