"""Invalid input: OpenAI's error format, the right status and parameter; the engine is not used."""

from __future__ import annotations

import inspect
import json
import re
from copy import copy
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from server_helpers import EOS, MAX_LENGTH, SayingEngine, ask, byte_tokenizer

from megatron_rl.agent.server.bodies import CHANGE_LOGITS, ChatBody, CompletionBody
from megatron_rl.agent.server.parameters import ADVICE, NEUTRAL, WITHOUT_EFFECT, asks_nothing

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
NO_TOKEN = EOS + 1


def refused(route: str, body: Any, status: int = 400, **options: Any) -> dict[str, Any]:
    engine = SayingEngine()
    response = ask(engine, route, body, **options)
    assert not engine.asked
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    return error


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", "3"), ("temperature", -0.1),
        ("temperature", "hot"), ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("top_k", 2**63),
        ("min_p", 1), ("n", 0), ("n", 129),
        ("stop", "x" * 10_000), ("stop", ["x"] * 17), ("stop", ""), ("stop_token_ids", [-1]),
        ("stop_token_ids", [NO_TOKEN]), ("prompt", [NO_TOKEN]), ("prompt", [-1]), ("prompt", []), ("prompt", ""),
        ("prompt", [[]]), ("prompt", None), ("logprobs", 21), ("logprobs", True), ("seed", "x"), ("stream", 1),
        ("min_tokens", 5), ("prompt_logprobs", 21), ("prompt_logprobs", -1), ("echo", "yes"), ("ignore_eos", 1),
    ],
)  # fmt: skip
def test_impossible_values_are_refused(param: str, value: Any) -> None:
    error = refused(COMPLETIONS, {"prompt": "ask", "max_tokens": 4, param: value})
    assert (error["param"] or "").split(".")[0] == param or param in error["message"]


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("best_of", 2), ("echo", True), ("continue_final_message", True), ("chat_template", "{{ 1 }}"),
        ("prompt_logprobs", 0), ("add_generation_prompt", False),
        ("structured_outputs", {"regex": "x"}), ("bad_words", ["x"]), ("chat_template_kwargs", {"tokenize": True}),
        ("reasoning_effort", "extreme"),
        ("suffix", "x"), ("response_format", {"type": "grammar"}), ("audio", {"voice": "x"}),
        ("tool_choice", {"type": "allowed_tools"}),
        ("functions", [{"name": "f"}]), ("no_such_parameter", 1),
        ("tool_choice", "required"), ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("top_logprobs", 3), ("service_tier", "flex"), ("stream_options", {"x": 1}), ("presence_penalty", 0.5),
        ("frequency_penalty", -1), ("repetition_penalty", 1.1), ("logit_bias", {"5": 1}),
    ],
)  # fmt: skip
def test_unsupported_parameters_are_refused_by_name(param: str, value: Any) -> None:
    error = refused(CHAT, {"messages": [USER], param: value})
    assert param in error["message"] and error["param"].split(".")[0] == param


OF_THE_CLIENT_ITSELF = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}


@pytest.mark.parametrize(
    ("route", "client", "body"),
    [(COMPLETIONS, "Completions", {"prompt": "ask"}), (CHAT, "chat.Completions", {"messages": [USER]})],
    ids=[COMPLETIONS, CHAT],
)
def test_parameters_of_openais_client_are_read_or_without_effect_or_refused_by_name(
    route: str, client: str, body: dict[str, Any]
) -> None:
    from openai import resources  # slow to import

    create = attrgetter(client)(resources).create
    params = inspect.signature(create).parameters.keys() - OF_THE_CLIENT_ITSELF
    assert len(params) > 15
    for param in sorted(params):
        given = {**body, "max_tokens": 4, param: [{"no such": "value"}]}
        if param in WITHOUT_EFFECT:
            assert ask(SayingEngine(), route, given).is_success, param
        else:
            assert refused(route, given)["param"].split(".")[0] == param


def test_every_parameter_that_is_acted_on_is_listed_in_the_docs() -> None:
    """The table in docs/inference.md must agree with the code."""
    both = (CompletionBody.model_fields.keys() & ChatBody.model_fields.keys()) - {*CHANGE_LOGITS}
    known = {
        "honoured": both,
        "honoured, `/v1/completions`": CompletionBody.model_fields.keys() - both - {*CHANGE_LOGITS},
        "honoured, `/v1/chat/completions`": ChatBody.model_fields.keys() - both - {*CHANGE_LOGITS},
        "without effect": WITHOUT_EFFECT,
    }
    page = (Path(__file__).parents[5] / "docs" / "inference.md").read_text()
    rows = dict(re.findall(r"^\| (honoured.*?|without effect) \| (.*) \|$", page, re.MULTILINE))
    assert {name: {*re.findall(r"`(\w+)`", row)} for name, row in rows.items()} == known


def test_values_that_ask_for_nothing_are_accepted_and_others_refused_with_advice() -> None:
    for name, values in {**NEUTRAL, "use_beam_search": (False, None), "documents": ([],), "suffix": ("",)}.items():
        for value in values:
            assert ask(SayingEngine(), COMPLETIONS, {"prompt": "x", name: value}).is_success, name
    assert ask(SayingEngine(), COMPLETIONS, {"prompt": "x", "n": 3, "best_of": 3}).is_success
    for name, advice in ADVICE.items():
        if name not in CompletionBody.model_fields:
            message = refused(COMPLETIONS, {"prompt": "x", name: ["no such value"]})["message"]
            assert message == f"{name} {advice}"
    assert refused(COMPLETIONS, {"prompt": "x", "priority": 3})["message"] == (
        "priority is not a parameter of this server; leave it out"
    )


@pytest.mark.parametrize(
    "messages",
    [
        [], [{}], [{"role": "robot", "content": "x"}], [{"role": "user", "content": 5}], ["hi"], "hi",
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{"}}]}],
    ],
)  # fmt: skip
def test_invalid_messages_are_refused(messages: Any) -> None:
    assert refused(CHAT, {"messages": messages})["param"].startswith("messages")


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[]", b'"x"', b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"temperature": NaN}', b"\x00",
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=range(9),
)  # fmt: skip
def test_invalid_json_is_refused(raw: bytes) -> None:
    assert refused(COMPLETIONS, raw)["code"] == "invalid_json"


def test_prompt_longer_than_the_context_is_refused() -> None:
    for body in (
        {"prompt": [1] * MAX_LENGTH},
        {"prompt": [1] * (MAX_LENGTH + 5), "max_tokens": 1},
        {"prompt": [1], "max_tokens": MAX_LENGTH},
        {"prompt": "x" * 30_000, "max_tokens": 10**18},
    ):
        assert refused(COMPLETIONS, body)["code"] == "context_length_exceeded"
    assert refused(CHAT, {"messages": [{"role": "user", "content": "x" * 500}]})["code"] == "context_length_exceeded"


def test_unknown_model_or_route_is_refused() -> None:
    assert refused("/v1/models/gpt-5", b"", 404, method="GET")["code"] == "model_not_found"
    assert refused("/v1/embeddings", {}, 404)["code"] == "unknown_url"
    assert refused(COMPLETIONS, b"", 405, method="GET")["code"] == "unknown_url"


def test_characters_without_a_token_are_refused() -> None:
    from megatron_rl.model.tokenizer import CharacterTokenizer

    error = refused(COMPLETIONS, {"prompt": "1x"}, tokenizer=CharacterTokenizer("012"))
    assert "no token for the character 'x'" in error["message"]


def test_failed_engine_is_a_server_error(caplog: pytest.LogCaptureFixture) -> None:
    engine = SayingEngine()
    engine.fails = RuntimeError("secret inner life")
    response = ask(engine, COMPLETIONS, {"prompt": "x"})
    assert response.status_code == 500 and "secret" not in response.text
    assert json.loads(response.text)["error"]["type"] == "server_error"


class FailsLater(SayingEngine):
    """An engine that fails after its first token."""

    def step(self) -> None:
        if any(saying.said for saying in self._under_way.values()):
            self.fails = RuntimeError("secret inner life")
        super().step()


def test_reader_of_a_part_learns_that_the_engine_has_failed() -> None:
    response = ask(FailsLater(), COMPLETIONS, {"prompt": "x", "stream": True})
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert response.status_code == 200 and json.loads(lines[0])["choices"][0]["text"]
    assert json.loads(lines[-1])["error"]["type"] == "server_error", "an error, and not [DONE]"
    assert "secret" not in response.text


def test_deepest_error_is_reported() -> None:
    """If a value may be text or a list, the type that does not fit is not reported."""
    content = [{"type": "text", "text": "hi"}, {"type": "text", "text": 5}]
    error = refused(CHAT, {"messages": [USER, {"role": "user", "content": content}]})
    assert error["param"] == "messages.1.content.1.text"


def test_only_one_of_many_mistakes_is_reported() -> None:
    """A body has room for millions."""
    for body in (
        {"prompt": [-1] * 1000},
        {"prompt": "x", "stop": [1] * 1000},
        {"prompt": "x"} | {f"unknown_{number}": 1 for number in range(1000)},
    ):
        with pytest.raises(ValidationError) as found:
            CompletionBody.model_validate(body)
        assert found.value.error_count() <= 6
        assert len(refused(COMPLETIONS, body)["message"]) < 200


def test_too_many_prompts_are_not_encoded() -> None:
    tokenizer, encoded = copy(byte_tokenizer()), list[str]()

    def encode(text: str) -> list[int]:
        encoded.append(text)
        return byte_tokenizer().encode(text)

    tokenizer.encode = encode  # type: ignore[method-assign,assignment]
    error = refused(COMPLETIONS, {"prompt": ["xyz"] * 100_000}, tokenizer=tokenizer)
    assert error["param"] == "n" and "100000 prompts" in error["message"]
    assert "xyz" not in encoded


def test_error_about_a_text_does_not_repeat_all_of_it() -> None:
    tokenizer = copy(byte_tokenizer())

    def encode(text: str) -> list[int]:
        raise ValueError(f"cannot read {text}")

    tokenizer.encode = encode  # type: ignore[method-assign,assignment]
    error = refused(COMPLETIONS, {"prompt": "x" * 10_000}, tokenizer=tokenizer)
    assert error["message"].startswith("prompt: cannot read xxx") and len(error["message"]) < 600


def test_too_many_messages_are_refused() -> None:
    assert refused(CHAT, {"messages": [USER] * 10_001})["param"] == "messages"


def test_model_reports_its_name_and_context() -> None:
    engine = SayingEngine()
    (card,) = ask(engine, "/v1/models", b"", method="GET").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", MAX_LENGTH)
    assert ask(engine, "/v1/models/tiny", b"", method="GET").json()["id"] == "tiny"


def test_a_misspelt_name_is_refused_though_its_value_is_false() -> None:
    assert asks_nothing("echo", False, {})
    assert not asks_nothing("add_special_token", False, {}), "which is on by default"
