"""Servers inside the cluster are reached without the environment's proxy."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from megatron_rl.agent.environments.judged.judged_arguments import JudgeConfig
from megatron_rl.agent.environments.judged.judges import Judge
from megatron_rl.agent.environments.judged.scoring_server import is_inside
from megatron_rl.agent.scoring import NotJudged
from megatron_rl.generate.engine.openai import Endpoint, EndpointError, ScoringServers

NOBODY = "http://127.0.0.1:9"


class Refusing(ThreadingHTTPServer):
    """Records the path of each request and refuses it."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    server: Refusing

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append(self.path)
        self.send_error(400)

    do_GET = do_POST

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Refusing]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, NOBODY)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with Refusing() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def refused(work: Coroutine[Any, Any, Any]) -> None:
    with suppress(NotJudged, EndpointError):
        asyncio.run(work)


def test_a_judge_on_a_node_is_reached_directly(server: Refusing) -> None:
    config = JudgeConfig(url=f"http://localhost:{server.server_port}/v1", model="wise", attempts=1)
    refused(Judge(config).score("1+1?", "2", "2"))
    assert server.asked == ["/v1/chat/completions"]


@pytest.mark.parametrize(
    ("host", "inside"),
    [("node07", True), ("10.1.2.3", True), ("127.0.0.1", True), ("fd00::1", True), ("api.openai.com", False)],
)
def test_a_judge_elsewhere_may_need_the_proxy(host: str, inside: bool) -> None:
    assert is_inside(host) is inside


def test_a_teacher_is_reached_directly(server: Refusing) -> None:
    servers = ScoringServers([Endpoint(f"http://127.0.0.1:{server.server_port}/v1", "tiny")], 1.0)
    refused(servers.score([1, 2]))
    assert server.asked == ["/v1/completions"]
