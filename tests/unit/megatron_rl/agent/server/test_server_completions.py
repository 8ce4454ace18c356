"""/v1/completions: parameters reach the engine, and its answers reach the client, whole or streamed."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import replace
from typing import Any

import pytest
import server_helpers
from server_helpers import EOS, SayingEngine, ask, byte_tokenizer, completion, encode, events, logprob

from megatron_rl.agent.server.samples import TokenNames
from megatron_rl.generate.engine.interface import Delta
from megatron_rl.recipe.inference import Sampling, ServedSampling

ROUTE = "/v1/completions"
USER = {"role": "user", "content": "1+1"}


def test_every_parameter_reaches_the_engine() -> None:
    engine = SayingEngine()
    asked: dict[str, Any] = {
        "model": "tiny", "prompt": "ask", "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "n": 3,
        "max_tokens": 9, "min_tokens": 2, "stop": ["x", "yz"], "stop_token_ids": [3], "seed": 5, "logprobs": 2,
    }  # fmt: skip
    completion(engine, **asked)
    (request,) = engine.asked
    assert request.prompt_tokens == encode("ask")
    assert (request.num_samples, request.key, request.top_logprobs) == (3, 5, 2)
    assert request.sampling == Sampling(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, max_new_tokens=9, min_new_tokens=2, stop=("x", "yz"),
        stop_tokens=(3,),
    )  # fmt: skip


def test_defaults_are_those_of_openai() -> None:
    engine = SayingEngine("a long answer that does not end soon")
    answer = completion(
        engine, max_tokens=None, stop=None, seed=None, n=None, presence_penalty=0, logit_bias={}, user="me"
    )
    assert engine.asked[0].sampling == Sampling(max_new_tokens=16)
    assert answer["choices"][0]["finish_reason"] == "length"
    counts = {"prompt_tokens": 3, "completion_tokens": 16, "total_tokens": 19}
    assert answer["usage"] == {**counts, "prompt_tokens_details": None}
    assert answer["system_fingerprint"] is None
    keys = {completion(engine) and engine.asked[-1].key for _ in range(3)}
    assert len(keys) == 3, "without a seed each request must get its own random numbers"


@pytest.mark.parametrize("stream", [False, True])
def test_log_prob_that_json_has_no_number_for_is_the_lowest_one(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    monkeypatch.setattr(server_helpers, "logprob", lambda token: -math.inf)
    response = ask(SayingEngine(), ROUTE, {"prompt": "ask", "logprobs": 0, "max_tokens": 2, "stream": stream})
    assert response.status_code == 200 and response.text.count("-9999.0") == 2


def test_text_ends_before_the_stop_string_and_tokens_with_it() -> None:
    answer = completion(SayingEngine("one stop two"), stop="stop", return_token_ids=True)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("one ", "stop")
    assert choice["token_ids"] == encode("one stop")
    assert choice["prompt_token_ids"] == encode("ask")
    assert choice["policy_versions"] == [7] * len(choice["token_ids"])


@pytest.mark.parametrize("prompts", [["one", "two"], [encode("one"), encode("two")]])
def test_several_prompts_have_their_choices_in_order(prompts: list[Any]) -> None:
    engine = SayingEngine(lambda request, sample: f"{byte_tokenizer().decode(request.prompt_tokens)}{sample}")
    answer = completion(engine, prompt=prompts, n=2, seed=1)
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "one0"), (1, "one1"), (2, "two0"), (3, "two1"),
    ]  # fmt: skip
    assert engine.asked[0].key != engine.asked[1].key


def test_ignore_eos_reaches_the_engine() -> None:
    engine = SayingEngine()
    completion(engine, ignore_eos=True)
    completion(engine, top_k=-1, repetition_penalty=1, presence_penalty=0, logit_bias={}, ignore_eos=False)
    assert [request.sampling for request in engine.asked] == [
        ServedSampling(max_new_tokens=100, ignore_eos=True), Sampling(max_new_tokens=100),
    ]  # fmt: skip


def test_text_starts_as_the_tokenizer_starts_any_text() -> None:
    """Token ids stay unchanged. Special tokens that a text spells out become tokens, as in a template."""
    begins = copy(byte_tokenizer())
    begins._prefix = [5]
    for asked, expected in (
        ({"prompt": "ask"}, [5, *encode("ask")]),
        ({"prompt": ["ask"], "add_special_tokens": False}, encode("ask")),
        ({"prompt": encode("ask")}, encode("ask")),
        ({"prompt": "a<end>"}, [5, *encode("a"), EOS]),
    ):
        engine = SayingEngine()
        assert ask(engine, ROUTE, asked, tokenizer=begins).is_success
        assert engine.asked[0].prompt_tokens == expected


def test_echo_starts_with_the_prompt_and_its_logprobs() -> None:
    """lm-eval requests log-likelihoods this way; the first token has none."""
    engine = SayingEngine("b")
    for asked, added in (({"max_tokens": 1}, "b"), ({"max_tokens": 0}, "")):
        answer = completion(engine, prompt="é ab", echo=True, logprobs=1, **asked)
        (choice,) = answer["choices"]
        assert engine.asked[-1].prompt_logprobs == 1
        assert (choice["text"], choice["finish_reason"]) == ("é ab" + added, "length")
        said, tokens = choice["logprobs"], encode("é ab" + added)
        assert said["tokens"] == ["é", " ", "ab", *added]
        assert said["token_logprobs"] == [None, *map(logprob, tokens[1:])]
        assert said["top_logprobs"] == [None, *({byte_tokenizer().show(t): logprob(t)} for t in tokens[1:])]
        assert answer["usage"]["completion_tokens"] == len(added)
    (choice,) = completion(engine, prompt=encode("é ab"), echo=True, max_tokens=1)["choices"]
    assert engine.asked[-1].prompt_logprobs is None and choice["text"] == "é abb"


def test_prompt_logprobs_are_by_token_id() -> None:
    engine = SayingEngine("b")
    (choice,) = completion(engine, prompt="ask", prompt_logprobs=2, max_tokens=1)["choices"]
    tokens = encode("ask")
    assert choice["text"] == "b" and choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1] == {
        str(tokens[1]): {"logprob": logprob(tokens[1]), "rank": 1, "decoded_token": "s"},
        str(tokens[1] + 1): {"logprob": logprob(tokens[1]) - 1, "rank": 2, "decoded_token": "t"},
    }
    refused = ask(engine, ROUTE, {"prompt": "ask", "prompt_logprobs": 0, "stream": True})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_logprobs"


def test_special_tokens_and_stop_strings_are_text_on_request() -> None:
    (choice,) = completion(SayingEngine("hi"), skip_special_tokens=False)["choices"]
    assert choice["text"] == "hi<end>"
    (choice,) = completion(SayingEngine("one stop two"), stop="stop", include_stop_str_in_output=True)["choices"]
    assert choice["text"] == "one stop"


class Likely(SayingEngine):
    """Finds other tokens likelier than the sampled one."""

    def __init__(self, text: str, others: dict[int, float]) -> None:
        super().__init__(text)
        self._others = others

    def _delta(self, *given: Any) -> Delta:
        delta = super()._delta(*given)
        return replace(delta, logprobs=[-9.0], top_logprobs=[dict(self._others)])


def test_sampled_token_keeps_its_name_and_value_and_others_keep_theirs() -> None:
    """Half characters, and the letters of a special token, do not share a name with others."""
    first, second = (byte_tokenizer().encode(text)[0] for text in ("🙂", "ñ"))
    engine = Likely("x", {first: -1.0, second: -2.0, EOS: -3.0})
    said = completion(engine, logprobs=3, max_tokens=1)["choices"][0]["logprobs"]
    assert said["top_logprobs"] == [{"bytes:\\xf0": -1.0, "bytes:\\xc3": -2.0, "<end>": -3.0, "x": -9.0}]


def test_tokens_with_the_same_name_are_distinguished_and_the_sampled_one_keeps_it() -> None:
    names = TokenNames(byte_tokenizer())
    names.name = lambda token: "same"  # type: ignore[assignment]
    named = names.by_name({5: -0.1, 6: -0.2, 7: -3.0}, 6, -0.2)
    assert named == {"token_id:5": -0.1, "same": -0.2, "token_id:7": -3.0}


def test_the_model_may_be_left_out_and_another_one_is_not_found() -> None:
    assert completion(SayingEngine())["model"] == completion(SayingEngine(), model="tiny")["model"] == "tiny"
    for route, asked in ((ROUTE, {"prompt": "a"}), ("/v1/chat/completions", {"messages": [USER]})):
        response = ask(SayingEngine(), route, {"model": "gpt-5", **asked})
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert "there is no model 'gpt-5' here: this server has 'tiny'" in error["message"]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [({}, None), ({"stop": ["xy", "b"]}, "b"), ({"stop_token_ids": [EOS]}, EOS), ({"max_tokens": 1}, None)],
)
def test_stop_reason_names_the_stop_string_or_token_that_the_request_gave(asked: Any, reason: Any) -> None:
    (choice,) = completion(SayingEngine("aéb"), **asked)["choices"]
    assert choice["stop_reason"] == reason
    streamed = events(SayingEngine("aéb"), ROUTE, {"prompt": "ask", **asked})
    assert [chunk["choices"][0]["stop_reason"] for chunk in streamed][-1] == reason


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"n": 3, "logprobs": 1, "return_token_ids": True, "stop": "ld"},
        {"n": 2, "logprobs": 2, "return_token_ids": True, "echo": True},
    ],
)
def test_streamed_answer_joins_to_the_whole_one(asked: dict[str, Any]) -> None:
    engine = SayingEngine(lambda request, sample: f"héllo🙂 wörld {sample}")
    body = {"prompt": "ask", "max_tokens": 100, "stream_options": {"include_usage": True}} | asked
    *chunks, last = events(engine, ROUTE, body)
    whole = completion(engine, **asked)
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    joined: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        assert chunk["object"] == "text_completion" and chunk["id"] == chunks[0]["id"]
        for choice in chunk["choices"]:
            so_far = joined.setdefault(choice["index"], choice)
            if so_far is choice:
                continue
            assert so_far["finish_reason"] is None
            so_far["text"] += choice["text"]
            so_far |= {name: choice[name] for name in ("finish_reason", "stop_reason")}
            for name in ("token_ids", "policy_versions"):
                if name in choice:
                    so_far[name] += choice[name]
            if choice["logprobs"]:
                for name in ("tokens", "token_logprobs", "top_logprobs"):
                    so_far["logprobs"][name] += choice["logprobs"][name]
    for choice in whole["choices"]:
        assert joined[choice["index"]] == choice
