"""/v1/completions: what is asked reaches the engine, and what the engine says is told, whole or streamed."""

from __future__ import annotations

from typing import Any

import pytest
from server_helpers import EOS, SayingEngine, byte_tokenizer, completion, encode, events, logprob

from megatron_rl.inference.config import Sampling

ROUTE = "/v1/completions"


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


def test_defaults_are_openais() -> None:
    engine = SayingEngine("a long answer that does not end soon")
    answer = completion(
        engine, max_tokens=None, stop=None, seed=None, n=None, presence_penalty=0, logit_bias={}, user="me"
    )
    assert engine.asked[0].sampling == Sampling(max_new_tokens=16)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 16, "total_tokens": 19}
    keys = {completion(engine) and engine.asked[-1].key for _ in range(3)}
    assert len(keys) == 3, "without a seed each request has random numbers of its own"


def test_the_text_ends_before_the_stop_string_and_the_tokens_with_it() -> None:
    answer = completion(SayingEngine("one stop two"), stop="stop", return_token_ids=True)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("one ", "stop")
    assert choice["token_ids"] == encode("one stop")
    assert choice["prompt_token_ids"] == encode("ask")
    assert choice["policy_versions"] == [7] * len(choice["token_ids"])


def test_token_ids_are_a_prompt_and_special_tokens_are_no_text() -> None:
    engine = SayingEngine("hi")
    answer = completion(engine, prompt=[5, 6, 7], return_token_ids=True)
    assert engine.asked[0].prompt_tokens == [5, 6, 7]
    assert answer["choices"][0]["text"] == "hi"
    assert answer["choices"][0]["token_ids"] == [*encode("hi"), EOS]


@pytest.mark.parametrize("prompts", [["one", "two"], [encode("one"), encode("two")]])
def test_several_prompts_have_their_choices_in_order(prompts: list[Any]) -> None:
    engine = SayingEngine(lambda request, sample: f"{byte_tokenizer().decode(request.prompt_tokens)}{sample}")
    answer = completion(engine, prompt=prompts, n=2, seed=1)
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "one0"), (1, "one1"), (2, "two0"), (3, "two1"),
    ]  # fmt: skip
    assert engine.asked[0].key != engine.asked[1].key


def test_logprobs_are_of_all_tokens_in_order() -> None:
    answer = completion(SayingEngine("aéb"), logprobs=2)
    said = answer["choices"][0]["logprobs"]
    tokens = [*encode("aéb"), EOS]
    assert said["tokens"] == ["a", "é", "b", "<end>"]
    assert said["token_logprobs"] == [logprob(token) for token in tokens]
    assert said["text_offset"] == [0, 1, 2, 3]
    assert all(len(place) == 2 for place in said["top_logprobs"])
    assert said["top_logprobs"][0]["a"] == logprob(tokens[0])


@pytest.mark.parametrize("asked", [{}, {"n": 3, "logprobs": 1, "return_token_ids": True, "stop": "ld"}])
def test_a_streamed_answer_joined_is_the_whole_one(asked: dict[str, Any]) -> None:
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
            so_far["finish_reason"] = choice["finish_reason"]
            for name in ("token_ids", "policy_versions"):
                if name in choice:
                    so_far[name] += choice[name]
            if choice["logprobs"]:
                for name in ("tokens", "token_logprobs", "top_logprobs"):
                    so_far["logprobs"][name] += choice["logprobs"][name]
    for choice in whole["choices"]:
        if choice["logprobs"]:
            del choice["logprobs"]["text_offset"], joined[choice["index"]]["logprobs"]["text_offset"]
        assert joined[choice["index"]] == choice
