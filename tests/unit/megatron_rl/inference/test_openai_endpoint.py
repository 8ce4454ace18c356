"""Servers with OpenAI's API as engines: requests to each kind, meaning of responses, refusals by name, and retries."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from streams import joined

from megatron_rl.errors import ConfigurationError
from megatron_rl.inference.api import AnswerPrefix, Completion, Delta, GenerationRequest, PromptTooLong, Unsupported
from megatron_rl.inference.config import Sampling
from megatron_rl.inference.openai import EndpointError, OpenAIInference
from megatron_rl.inference.openai_bodies import Endpoint, UnusableAnswer, body
from megatron_rl.model.tokenizer import CharacterTokenizer

TOKENIZER = CharacterTokenizer("0123456789+-=")
Kind = Literal["mrl", "vllm"]
Reply = httpx.Response | Exception


def endpoint(kind: Kind = "mrl", **fields: Any) -> Endpoint:
    return Endpoint("http://node:8000/v1", "tiny", kind, **fields)


def ask(samples: int = 1, top_logprobs: int = 0, key: int = 5, **sampling: Any) -> GenerationRequest:
    asked = Sampling(**({"max_new_tokens": 4} | sampling))
    return GenerationRequest([1, 10, 1, 12], samples, asked, key, top_logprobs=top_logprobs)


def choice(index: int = 0, tokens: Sequence[int] = (2, 13), **fields: Any) -> dict[str, Any]:
    logprobs = {"token_logprobs": [-0.5 * token for token in tokens]}
    return {"index": index, "token_ids": [*tokens], "logprobs": logprobs, "finish_reason": "stop", **fields}


def answer(*choices: dict[str, Any]) -> httpx.Response:
    return httpx.Response(200, json={"choices": [*choices]})


def error(status: int, message: str = "no", code: str | None = None, **headers: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message, "code": code}}, headers=headers)


class Server:
    """Gives the replies in turn, and records the requests."""

    def __init__(self, *replies: Reply) -> None:
        self.replies = [*replies]
        self.asked: list[httpx.Request] = []
        self.pauses: list[float] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)

    def inference(self, asked: Endpoint, **fields: Any) -> OpenAIInference:
        return OpenAIInference(asked, transport=httpx.MockTransport(self), sleep=self.sleep, **fields)

    def generate(
        self, asked: Endpoint, request: GenerationRequest, version: int = 0, **fields: Any
    ) -> list[Completion]:
        async def work() -> list[Completion]:
            async with self.inference(asked, **fields) as inference:
                inference.policy_version = version
                return await inference.generate(request)

        return asyncio.run(work())

    def stream(self, asked: Endpoint, request: GenerationRequest) -> list[Delta]:
        async def work() -> list[Delta]:
            async with self.inference(asked) as inference:
                return [part async for part in inference.stream(request)]

        return asyncio.run(work())


# Requests


@pytest.mark.parametrize("kind", ["mrl", "vllm"])
def test_every_parameter_is_sent_to_a_server_that_has_it(kind: Kind) -> None:
    request = ask(3, key=2**64 - 2, top_p=0.9, top_k=7, min_p=0.1, min_new_tokens=2, stop=("a", "b"), stop_tokens=(4,))
    asked = body(request, endpoint(kind))
    assert asked == {
        "model": "tiny",
        "prompt": [1, 10, 1, 12],
        "n": 3,
        "max_tokens": 4,
        "temperature": 1.0,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "min_tokens": 2,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": ["a", "b"],
        "stop_token_ids": [4],
        "seed": 2**64 - 2 if kind == "mrl" else -2,  # vLLM takes a signed seed
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


@pytest.mark.parametrize(
    ("kind", "fields", "name"),
    [
        ("vllm", {"temperature": 0.7}, "temperature"),
    ],
)
def test_unsupported_parameters_are_refused_by_name(kind: Kind, fields: dict[str, Any], name: str) -> None:
    with pytest.raises(Unsupported, match=name):
        body(ask(**fields), endpoint(kind))


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}, {"min_new_tokens": 1}], ids=str)
def test_vllm_logprobs_that_do_not_cover_all_tokens_are_refused(cut: dict[str, Any]) -> None:
    processed = endpoint("vllm", processed_logprobs=True)
    assert body(ask(temperature=0.7), processed)["temperature"] == 0.7
    with pytest.raises(Unsupported, match=next(iter(cut))):
        body(ask(**cut), processed)
    assert body(ask(**cut), endpoint("vllm"))


def test_vllm_is_asked_once_for_several_greedy_answers_to_a_prompt() -> None:
    """vLLM refuses several, which are the same."""
    server = Server(answer(choice()), answer(choice()))
    greedy = server.generate(endpoint("vllm"), ask(3, temperature=0.0))
    assert json.loads(server.asked[0].content)["n"] == 1
    assert [one.tokens for one in greedy] == [[2, 13]] * 3
    with pytest.raises(UnusableAnswer, match="1 choices, but the request asked for 3"):
        server.generate(endpoint("mrl"), ask(3, temperature=0.0))


def test_known_tokens_are_refused() -> None:
    known = {0: AnswerPrefix([1], [-1.0], [0])}
    with pytest.raises(Unsupported, match="known"):
        body(replace(ask(), known=known), endpoint())


def test_tokens_logprobs_and_versions_are_those_of_the_server() -> None:
    server = Server(answer(choice(1, [3], finish_reason="length", policy_versions=[8]), choice(policy_versions=[8, 9])))
    first, second = server.generate(endpoint(), ask(2))
    assert first == Completion([2, 13], [-1.0, -6.5], "stop", [8, 9])
    assert second == Completion([3], [-1.5], "length", [8])
    assert server.asked[0].url == "http://node:8000/v1/completions"
    assert json.loads(server.asked[0].content) == body(ask(2), endpoint())


def test_vllm_reports_stop_strings_and_likeliest_tokens_and_the_configured_version() -> None:
    logprobs = {
        "token_logprobs": [-0.1, -2.0],
        "top_logprobs": [{"token_id:2": -0.1, "token_id:7": -3.0}, {"token_id:3": -0.2, "token_id:1": -2.0}],
    }
    server = Server(answer(choice(tokens=[2, 1], logprobs=logprobs, stop_reason="21")))
    (made,) = server.generate(endpoint("vllm"), ask(top_logprobs=1, stop=("21",)), version=4)
    assert (made.stop, made.versions) == ("21", [4, 4])
    assert made.top_logprobs == [{2: -0.1}, {3: -0.2}]


def test_stop_string_is_found_if_the_server_does_not_name_it() -> None:
    server = Server(answer(choice(tokens=[2, 1, 5], policy_versions=[0, 0, 0])))
    (made,) = server.generate(endpoint(), ask(stop=("15", "7")), tokenizer=TOKENIZER)
    assert made.stop == "15"


def test_stream_parts_join_to_the_answer() -> None:
    parts = [
        {"choices": [choice(1, [4], finish_reason=None)]},
        {"choices": [choice(0, [2], finish_reason=None), choice(1, [], finish_reason="length")]},
        {"choices": [choice(0, [13])]},
        {"choices": [], "usage": {"total_tokens": 9}},
    ]
    events = "".join(f"data: {json.dumps(part)}\n\n" for part in parts)
    server = Server(httpx.Response(200, text=f": comment\n\n{events}data: [DONE]\n\n"))
    first, second = joined(server.stream(endpoint(), ask(2)))
    assert (first.tokens, first.finish_reason) == ([2, 13], "stop")
    assert (second.tokens, second.finish_reason) == ([4], "length")
    assert json.loads(server.asked[0].content)["stream"] is True


@pytest.mark.parametrize(
    "text",
    [
        'data: {"choices": []}\n\n',
        "data: {half",
        'data: {"error": {"message": "out of memory"}}\n\n',
    ],
)
def test_interrupted_stream_is_an_error(text: str) -> None:
    with pytest.raises(EndpointError):
        Server(httpx.Response(200, text=text)).stream(endpoint(), ask())


@pytest.mark.parametrize(
    "reply",
    [
        httpx.Response(200, text="<html>"),
        httpx.Response(200, json={"choices": 3}),
        answer(),
        answer(choice(1)),
        answer({"index": 0, "text": "17", "finish_reason": "stop"}),
        answer(choice(tokens=[])),
        answer(choice(logprobs=None)),
        answer(choice(logprobs={"token_logprobs": [-1.0]})),
        answer(choice(policy_versions=[1])),
        answer(choice(finish_reason="abort")),
        answer(choice(finish_reason=None)),
    ],
)
def test_incomplete_answer_is_an_error(reply: httpx.Response) -> None:
    with pytest.raises(UnusableAnswer):
        Server(reply).generate(endpoint(), ask())


# Faults


@pytest.mark.parametrize("passing", [error(429), error(503), httpx.ConnectError("refused"), httpx.ReadError("gone")])
def test_busy_or_absent_server_is_retried(passing: Reply) -> None:
    server = Server(passing, passing, answer(choice(policy_versions=[0, 0])))
    assert server.generate(endpoint(), ask())
    assert server.pauses == [0.5, 1.0]
    assert len({request.content for request in server.asked}) == 1


def test_retry_after_is_respected_and_attempts_are_limited() -> None:
    server = Server(*(error(429, "full", retry_after="x"), error(429, **{"retry-after": "7"})), error(503, "loading"))
    with pytest.raises(EndpointError, match="503: loading"):
        server.generate(endpoint(attempts=3), ask())
    assert server.pauses == [0.5, 7.0]


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (error(400, "too long", "context_length_exceeded"), PromptTooLong),
        (error(400, "This model's maximum context length is 20 tokens"), PromptTooLong),
        (error(400, "logit_bias is not supported", "unsupported_parameter"), Unsupported),
        (error(400, "bad"), EndpointError),
        (error(404, "no such model"), EndpointError),
        (error(401, "who are you"), ConfigurationError),
        (httpx.Response(422, text="what"), EndpointError),
    ],
)
def test_permanent_errors_are_not_retried(reply: httpx.Response, kind: type[Exception]) -> None:
    server = Server(reply)
    with pytest.raises(kind):
        server.generate(endpoint(), ask())
    assert len(server.asked) == 1


# The token


def test_token_comes_from_a_file_or_a_variable_and_is_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    monkeypatch.setenv("SOME_TOKEN", "0ther")
    for asked, expected in (
        (endpoint(token_file=tmp_path / "token"), "Bearer s3cret"),
        (endpoint(token_variable="SOME_TOKEN"), "Bearer 0ther"),
    ):
        server = Server(answer(choice(policy_versions=[0, 0])))
        server.generate(asked, ask())
        assert server.asked[0].headers["Authorization"] == expected
        assert "s3cret" not in repr(asked)
        assert "0ther" not in repr(asked)


@pytest.mark.parametrize("write", [lambda path: None, lambda path: path.write_text("\n"), lambda path: path.mkdir()])
def test_unreadable_token_is_one_clear_error(tmp_path: Path, write: Callable[[Path], object]) -> None:
    write(tmp_path / "token")
    with pytest.raises(ConfigurationError, match="token"):
        OpenAIInference(endpoint(token_file=tmp_path / "token"))


def test_error_body_in_plain_text_is_understood() -> None:
    server = Server(httpx.Response(400, json={"error": "no such model"}))
    with pytest.raises(EndpointError, match="HTTP 400: no such model"):
        server.generate(endpoint("vllm"), ask())
