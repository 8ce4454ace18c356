"""Messages between ranks and replicas, teachers, vLLM and agents, whatever their sender makes of them: understood, or
an error that counts as the sender's."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from hypothesis import given
from odd_values import DEEP, as_json, changed, drawn, refusal, spoilt
from scripted_replica import DIGEST, TOKEN, ScriptedEngine, ScriptedWeights

from megatron_rl.agent.remote.agent_wire import decode_completions, decode_result, encode_completions
from megatron_rl.contract.attempt_records import ReplicaAddress
from megatron_rl.contract.paths import RunDir
from megatron_rl.generate.engine.interface import AnswerPrefix, Completion, Delta, GenerationRequest, TokenScore
from megatron_rl.generate.engine.openai import Endpoint, EndpointError, ScoringServers, scoring_answer
from megatron_rl.generate.refit.probe import Probe
from megatron_rl.generate.replica.app import ReplicaService
from megatron_rl.generate.replica.leader import Leader, LedEngineThread
from megatron_rl.generate.replicas.link import LinkTimings, ReplicaGone, ReplicaLink
from megatron_rl.generate.replicas.unanswered import Unanswered
from megatron_rl.generate.replicas.wire import (
    PROTOCOL,
    About,
    Garbled,
    News,
    Refusal,
    decode_about,
    decode_news,
    decode_request,
    encode_news,
    encode_request,
)
from megatron_rl.generate.vllm.client import VllmClient, stats_in
from megatron_rl.generate.vllm.process import VllmGone, VllmRefused
from megatron_rl.rank.activity import Activity
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.inference import Sampling

SAMPLING = Sampling(max_new_tokens=5, stop=("x",))
ASKED = GenerationRequest([5, 6], 2, SAMPLING, 7, 3, {1: AnswerPrefix([1], [-1.0], [0], [b"ab"])}, id="a")
ABOUT = About(1, 0, 8, 3, 2, 1, 0.5, 0, 4.5)
DELTA = Delta(1, [5], [-1.0], [3, 3], None, "stop", "x", choices=[b"ab"])
NEWS = encode_news(News(ABOUT, 7, [("a", DELTA)], [Refusal("b", "value", "why")]))
COMPLETIONS = encode_completions([Completion([5], [-1.0], "stop", [0], None, choices=[b"ab"])])
SEQUENCE = {
    "tokens": [1, 2],
    "loss_mask": [False, True],
    "logprobs": [0.0, -1.0],
    "versions": [-1, 0],
    "turns": [[1, 2]],
    "choices": [0, 2, [], "YWJhYg=="],
    "grammars": [""],
}
ANSWER = {"sequences": [SEQUENCE], "text": "x", "reward": 1.0, "finish_reason": "stop", "tool_calls": None}
RESULT = {
    "answers": [{**ANSWER, "components": {"a": 1.0}, "output": "", "turn_scores": [[1.0, "k", "a", 0]]}],
    "failures": {"why": 1},
    "final_answers": ["4"],
}


@given(drawn(lambda random: changed(NEWS, random)), drawn(lambda random: changed(encode_request(ASKED), random)))
def test_news_and_requests_are_understood_or_garbled(news: Any, asked: Any) -> None:
    def take() -> None:
        found = decode_news(news)
        work = Unanswered(GenerationRequest([5, 6], 2, SAMPLING, 7))
        for _, delta in found.pieces:
            refusal(partial(work.take, delta, 0.0), ValueError)
            assert work.outstanding >= 0

    if isinstance(news, dict):
        refusal(take, Garbled)
    refusal(lambda: encode_request(decode_request(asked)), Garbled)


@given(drawn(lambda random: changed(COMPLETIONS, random)), drawn(lambda random: changed(RESULT, random)))
def test_completions_and_results_of_agents_are_understood_or_garbled(completions: Any, result: Any) -> None:
    refusal(lambda: decode_completions(completions), Garbled)
    refusal(lambda: decode_result(result, 10), Garbled)


# Faults that were found: values of a replica's state that ended the supervision of all replicas, and so the run.
STATES: list[dict[str, Any]] = [
    {"version": "3"}, {"version": [3]}, {"running": None}, {"cache_used": float("nan")}, {"busy_s": "1"}, {"state": []},
    {"sampled": {}}, {"version": 10**400}, {"preemptions": 1.5},
]  # fmt: skip


@pytest.mark.parametrize("wrong", STATES, ids=str)
def test_state_of_another_type_is_garbled(wrong: dict[str, Any]) -> None:
    assert decode_about({"about": asdict(ABOUT)}) == ABOUT
    said = refusal(lambda: decode_about({"about": asdict(ABOUT) | wrong}), Garbled)
    assert said is not None and said.startswith(f"about: {next(iter(wrong))}: Input should be")
    for torn in ({}, {"about": None}, {"about": {"replica": 1}}):
        assert refusal(lambda torn=torn: decode_about(torn), Garbled)  # type: ignore[misc]


def test_answer_longer_than_was_asked_for_is_an_error() -> None:
    work = Unanswered(GenerationRequest([5, 6], 1, SAMPLING, 7))
    work.take(Delta(0, [1] * 4, [-1.0] * 4, [0] * 4), 0.0)
    assert "more than 5 tokens" in (refusal(lambda: work.take(Delta(0, [1, 1], [0, 0], [0, 0]), 0.0), ValueError) or "")


# A replica that answers anything


async def link_ends(reply: bytes) -> str:
    """Return why a link to a server that always replies this is given up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = ReplicaAddress(0, 0, "127.0.0.1", server.sockets[0].getsockname()[1], 1, DIGEST, PROTOCOL, 0.0)
    timings = LinkTimings(poll_s=0.1, silence_s=0.5, retry_s=0.05)
    link = ReplicaLink(address, TOKEN, DIGEST, 0, timings, lambda *_: None, lambda _: None)
    try:
        await asyncio.wait_for(link.run(), 60)
    except ReplicaGone as error:
        return str(error)
    finally:
        server.close()
    raise AssertionError("unreachable")


def http(content: bytes, *, status: int = 200, head: str = "") -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\n{head}\r\n".encode() + content


REPLIES = {
    b"": "silent",
    b"SSH-2.0-OpenSSH\r\n": "silent",
    b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n": "silent",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n": "silent",
    b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000: "silent",
    http(b"not packed", head="Content-Encoding: gzip\r\n"): "violates the protocol: DecodingError",
    http(b"", status=302, head="Location: http://elsewhere/\r\n"): "fails with HTTP 302",
    http(b"[" * DEEP): "violates the protocol: it has more than 100 lists",
    http(b"\xff\xfe"): "violates the protocol",
    http(b"[]"): "violates the protocol: []",
    http(b"{}"): "violates the protocol: about: Input should be",
    http(as_json({"about": asdict(ABOUT) | {"version": "3"}})): "version: Input should be a valid integer",
}


def test_link_to_a_replica_that_violates_the_protocol_is_given_up_with_a_reason() -> None:
    async def run() -> list[str]:
        return await asyncio.gather(*map(link_ends, REPLIES))

    for found, expected in zip(asyncio.run(run()), REPLIES.values(), strict=True):
        assert expected in found


# A replica that is asked anything

BODIES: dict[str, dict[str, Any]] = {
    "hello": {},
    "ask": {"version": 0, "requests": [encode_request(ASKED)], "cancel": ["b"]},
    "news": {"seen": 0, "wait_s": 0.01},
    "start": {},
    "sleep": {},
    "receive": {"version": 1, "epoch": {"number": 1}},
    "swap": {"version": 0, "probe": Probe((1, 2), (-1.0,), 0.1).encode()},
}


def request_to_replica(random: Random) -> tuple[str, bytes]:
    path = random.choice([*BODIES])
    body = {"protocol": PROTOCOL, "digest": DIGEST, "driver": 1, **BODIES[path]}
    if random.randrange(3) == 0:
        return path, spoilt(as_json(body), random)
    kept = {"protocol", "digest", "driver"} if random.randrange(4) else set()
    other = changed({key: value for key, value in body.items() if key not in kept}, random)
    return path, as_json(other if not isinstance(other, dict) else {key: body[key] for key in kept} | other)


async def posted(requests: list[tuple[str, bytes]]) -> list[httpx.Response]:
    replica = RunDir("/nonexistent").attempt(1).replica(0)
    engine = ScriptedEngine()
    led = LedEngineThread(Leader(engine, ScriptedWeights(engine), None, Activity(replica, published=False)))
    service = ReplicaService(led, ReplicaAddress(0, 0, "", 0, 1, DIGEST, PROTOCOL, 0.0), TOKEN)
    transport = httpx.ASGITransport(service.app, raise_app_exceptions=False)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with led.running(), httpx.AsyncClient(transport=transport, base_url="http://t", headers=headers) as client:
        return await asyncio.gather(*(client.post(f"/{path}", content=content) for path, content in requests))


@given(drawn(lambda random: [request_to_replica(random) for _ in range(10)]))
def test_replica_answers_or_refuses_requests_of_any_shape(requests: list[tuple[str, bytes]]) -> None:
    for response, asked in zip(asyncio.run(posted(requests)), requests, strict=True):
        assert response.status_code in (200, 400, 409, 424) and response.content, (asked, response.text)


def test_faults_found_in_requests_to_a_replica_stay_mended() -> None:
    common = {"protocol": PROTOCOL, "digest": DIGEST, "driver": 1}
    bodies = [
        ("hello", b"[" * DEEP),
        (
            "ask",
            as_json({**common, "version": 0, "requests": [encode_request(ASKED) | {"prompt": ["5"]}], "cancel": []}),
        ),
        ("ask", as_json({**common, "version": 0, "requests": 5, "cancel": []})),
        ("ask", as_json({**common, "version": 0, "requests": [], "cancel": [[]]})),
        ("news", as_json({**common, "seen": 0, "wait_s": float("nan")})),
        ("news", as_json({**common, "seen": "0", "wait_s": 1})),
        ("swap", as_json({**common, "version": None, "probe": None})),
    ]
    assert [response.status_code for response in asyncio.run(posted(bodies))] == [400] * len(bodies)


# Teachers, and vLLM

TOKENS = [1, 2, 3]
EVENT = {
    "choices": [
        {
            "index": 0,
            "token_ids": [5],
            "logprobs": {"content": [{"logprob": -0.5}]},
            "finish_reason": "stop",
            "weight_versions": [{"version": "7", "start": 0, "end": 1}],
        }
    ]
}
SCORED = {"prompt_logprobs": [None, {"2": {"logprob": -1.0}}, {"3": {"logprob": -1.0}}]}
METRICS = b'vllm:cache_config_info{num_gpu_blocks="480"} 1.0\nvllm:num_requests_running{engine="0"} 2.0\nnan NaN\n'


@cache
def vllm() -> VllmClient:
    return VllmClient(Path("/nonexistent"))  # loads certificates, which takes longer than most tests


def vllm_replying(reply: bytes) -> VllmClient:
    client = vllm()
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=reply))
    client._client = httpx.AsyncClient(base_url="http://vllm", transport=transport)
    return client


async def generated(reply: bytes) -> None:
    client = vllm_replying(reply)
    try:
        async for piece in client.generate([1], SAMPLING, [0]):
            assert piece.sample == 0 and len(piece.tokens) == len(piece.logprobs)
            assert all(each <= 1e30 for each in piece.logprobs) and all(each >= 0 for each in piece.tokens)
    finally:
        await client.close()


async def scored_by_vllm(reply: bytes) -> None:
    client = vllm_replying(reply)
    try:
        assert all(abs(each.logprob) < 1e30 for each in await client.score(TOKENS))
    finally:
        await client.close()


async def scored_by_teacher(reply: httpx.Response) -> None:
    servers = ScoringServers([Endpoint("http://t/v1", "m")], -1.0, transport=httpx.MockTransport(lambda _: reply))
    assert all(abs(each.logprob) < float("inf") for each in await servers.score(TOKENS))


def body(of: Any, random: Random) -> bytes:
    return as_json(changed(of, random)) if random.randrange(3) else spoilt(as_json(of), random)


@given(
    drawn(lambda random: b"data: " + body(EVENT, random) + b"\n\n"),
    drawn(lambda random: body(SCORED, random)),
    drawn(lambda random: spoilt(METRICS, random)),
)
def test_replies_of_vllm_are_understood_or_its_end(event: bytes, scores: bytes, metrics: bytes) -> None:
    refusal(lambda: asyncio.run(generated(event)), VllmGone)
    refusal(lambda: asyncio.run(scored_by_vllm(scores)), VllmGone, VllmRefused)
    stats_in(metrics.decode("utf-8", "replace"))


@pytest.mark.parametrize(
    "choice",
    [
        {"index": 5}, {"index": "0"}, {"token_ids": [-1]}, {"token_ids": [1.5]}, {"logprobs": []},
        {"finish_reason": "abort"},
        {"logprobs": {"content": [{"logprob": float("nan")}]}}, {"logprobs": {"content": [{"logprob": 10**400}]}},
        {"weight_versions": [{"version": "7", "start": 0, "end": 10**12}]}, {"weight_versions": [[]]},
    ],
    ids=str,
)  # fmt: skip
def test_faults_found_in_replies_of_vllm_stay_mended(choice: dict[str, Any]) -> None:
    for choices in ([EVENT["choices"][0] | choice], "x", None, [[]]):
        reply = b"data: " + as_json({"choices": choices}) + b"\n\n"
        assert "vLLM" in (refusal(lambda reply=reply: asyncio.run(generated(reply)), VllmGone) or "")  # type: ignore[misc]
    assert stats_in("vllm:num_requests_running NaN\nvllm:num_requests_waiting 1e999\n") == stats_in("")


@given(drawn(lambda random: body(scoring_answer(TOKENS, [TokenScore(-1.0, [], []), TokenScore(-2.0, [], [])]), random)))
def test_replies_of_teachers_are_log_probs_or_an_error_of_the_server(reply: bytes) -> None:
    refusal(
        lambda: asyncio.run(scored_by_teacher(httpx.Response(200, content=reply))), EndpointError, ConfigurationError
    )


@pytest.mark.parametrize(
    "logprob", [float("nan"), float("inf"), 1e308, 10**400, "x", None, []], ids=lambda one: str(one)[:9]
)
def test_teacher_without_finite_log_probs_is_an_error_of_the_server(logprob: Any) -> None:
    scored = [{"2": {"logprob": logprob}}, {"3": {"logprob": -1.0}}]
    for content in (as_json({"choices": [{"prompt_logprobs": [None, *scored]}]}), b"[" * DEEP):
        said = refusal(lambda c=content: asyncio.run(scored_by_teacher(httpx.Response(200, content=c))), EndpointError)  # type: ignore[misc]
        assert said is not None and "log-probs of a prompt are missing" in said
