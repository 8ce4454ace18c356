"""Every request parameter is honoured by `generate` and `stream`, or refused by name."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from core_helpers import ALPHABET, END, VOCAB, full_forward, tiny_model, tiny_policy
from pydantic import ValidationError
from streams import assert_same, joined

from megatron_rl.generate.engine.engine import Engine
from megatron_rl.generate.engine.interface import (
    AnswerPrefix,
    Completion,
    Delta,
    GenerationRequest,
    PromptTooLong,
    Unsupported,
)
from megatron_rl.generate.engine.top_logprobs import TopLogprobsRows
from megatron_rl.model.policy import Policy
from megatron_rl.model.tokenizer import CharacterTokenizer
from megatron_rl.recipe.inference import InferenceConfig, Sampling, ServedSampling

TOKENIZER = CharacterTokenizer(ALPHABET)
PROMPT = [1, 10, 2, 12]
PLAIN = Sampling(max_new_tokens=24)
LOOKS = [1, pytest.param(3, marks=pytest.mark.slow), 16]


@pytest.fixture(scope="module")
def policy(platform: Any, groups: Any) -> Policy:
    return tiny_policy(platform, scale=0.15)


@pytest.fixture(params=LOOKS, ids="looks every {}".format)
def engine(policy: Policy, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Two engines: the host checks for ended rows as often as on a CPU, and as seldom as on a GPU."""
    monkeypatch.setattr(policy.kernels, "tokens_between_syncs", request.param)
    return engine_of(policy)


def engine_of(policy: Policy, end_ids: Sequence[int] = (END,), max_batch: int = 16) -> Engine:
    return Engine(policy, tiny_model(), InferenceConfig(max_batch=max_batch), end_ids, decode=TOKENIZER.decode)


def ask(samples: int = 24, **fields: Any) -> GenerationRequest:
    top = fields.pop("top_logprobs", 0)
    sampling = Sampling(**({"max_new_tokens": 24} | fields))
    return GenerationRequest(PROMPT, samples, sampling, key=3, top_logprobs=top)


def generate(engine: Engine, request: GenerationRequest) -> list[Completion]:
    return asyncio.run(asyncio.wait_for(engine.generate(request), timeout=60))


def stream(engine: Engine, request: GenerationRequest) -> list[Delta]:
    async def read() -> list[Delta]:
        return [delta async for delta in engine.callers.stream(request)]

    return asyncio.run(asyncio.wait_for(read(), timeout=60))


def cut(whole: Sequence[Completion], stop: Sequence[str]) -> list[Completion]:
    """Cut complete answers at their stop strings, by the definition."""
    found = []
    for one in whole:
        for count in range(1, len(one.tokens) + 1):
            text = TOKENIZER.decode(one.tokens[:count])
            if present := [string for string in stop if string in text]:
                tokens, logprobs, versions = one.tokens[:count], one.logprobs[:count], one.versions[:count]
                one = Completion(tokens, logprobs, "stop", versions, min(present, key=text.index))
                break
        found.append(one)
    return found


STOPS = [ALPHABET[2], ALPHABET[10] + ALPHABET[1], "0", "999999"]


def test_answer_ends_with_the_token_that_completes_a_stop_string(engine: Engine) -> None:
    whole = generate(engine, ask())
    expected = cut(whole, STOPS)
    assert len({one.stop for one in expected}) > 2  # otherwise the case tests nothing
    assert_same(generate(engine, ask(stop=tuple(STOPS))), expected)
    assert_same(joined(stream(engine, ask(stop=tuple(STOPS)))), expected)


def test_interrupted_answer_ends_at_its_stop_string_too(engine: Engine) -> None:
    """Any interruption will do, although the engine samples past the string before it looks."""
    whole = generate(engine, ask())
    expected = cut(whole, STOPS)
    for length in (1, 2, 5, 24):
        known = {
            i: AnswerPrefix(one.tokens[:length], one.logprobs[:length], one.versions[:length])
            for i, one in enumerate(whole)
            if i % 3
        }
        request = replace(ask(stop=tuple(STOPS)), known=known)
        assert_same(generate(engine, request), expected)
        assert_same(joined(stream(engine, request)), expected)


def test_partial_answers_never_go_past_a_stop_string(engine: Engine) -> None:
    expected = cut(generate(engine, ask()), STOPS)
    request = ask(stop=tuple(STOPS))
    engine.submit(request)
    while engine.busy:
        engine.step()
        for part in engine.partial_answers():
            answer = expected[part.sample]
            assert part.prefix.tokens == answer.tokens[: len(part.prefix.tokens)]
    assert_same(engine.take(request.id) or [], expected)


def test_ignore_eos_lets_answers_contain_end_tokens(engine: Engine) -> None:
    """Also with min_new_tokens, which then excludes no token."""
    plain, asked = generate(engine, ask()), {"max_new_tokens": 24, "ignore_eos": True}
    requests = [replace(ask(), sampling=ServedSampling(**asked, min_new_tokens=least)) for least in (0, 24)]
    endless, held = (generate(engine, request) for request in requests)
    assert {(one.finish_reason, len(one.tokens)) for one in endless} == {("length", 24)}
    assert any(END in one.tokens[:-1] for one in endless)
    assert [one.tokens[: len(first.tokens)] for one, first in zip(endless, plain, strict=True)] == [
        one.tokens for one in plain
    ]
    assert_same(held, endless)


@pytest.mark.parametrize("stop_tokens", [(2,), (2, 5, 7)], ids=str)
def test_stop_tokens_end_an_answer_besides_the_end_token(engine: Engine, stop_tokens: tuple[int, ...]) -> None:
    made = generate(engine, ask(stop_tokens=stop_tokens))
    assert {one.tokens[-1] for one in made if one.finish_reason == "stop"} == {END, *stop_tokens}
    for one in made:
        assert not {END, *stop_tokens} & {*one.tokens[:-1]}
        assert one.stop is None
    assert_same(joined(stream(engine, ask(stop_tokens=stop_tokens))), made)


def test_model_may_have_several_end_tokens(policy: Policy) -> None:
    by_request = generate(engine_of(policy), ask(stop_tokens=(5, 2)))
    assert_same(generate(engine_of(policy, end_ids=(2, END, 5)), ask()), by_request)


def test_no_answer_ends_before_min_new_tokens(engine: Engine) -> None:
    made = generate(engine, ask(min_new_tokens=6, stop_tokens=(2,)))
    assert min(len(one.tokens) for one in made) == 7  # six tokens and an end
    assert {one.finish_reason for one in made} == {"stop", "length"}
    for one in made:
        assert not {END, 2} & {*one.tokens[:6]}
    assert_same(joined(stream(engine, ask(min_new_tokens=6, stop_tokens=(2,)))), made)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
def test_top_logprobs_are_of_the_model_before_any_cut(engine: Engine, temperature: float) -> None:
    request = ask(3, temperature=temperature, top_k=3, top_logprobs=4)
    made = generate(engine, request)
    for one in made:
        logits = full_forward(engine.policy, [*PROMPT, *one.tokens])[len(PROMPT) - 1 : -1].double()
        logprobs = (logits[:, :VOCAB] / (temperature or 1.0)).log_softmax(-1)
        assert one.top_logprobs is not None
        assert len(one.top_logprobs) == len(one.tokens)
        for top, expected, token, log_prob in zip(one.top_logprobs, logprobs, one.tokens, one.logprobs, strict=True):
            assert [*top.values()] == sorted(top.values(), reverse=True)
            values, _ = expected.topk(4)
            torch.testing.assert_close(torch.tensor([*top.values()]).double(), values, rtol=1e-5, atol=1e-5)
            for likely, value in top.items():
                assert value == pytest.approx(float(expected[likely]), abs=1e-4)
            assert top.get(token, log_prob) == log_prob
    assert_same(joined(stream(engine, request)), made)


def test_each_request_gets_its_own_number_of_top_logprobs(engine: Engine) -> None:
    """There are more neighbours than rows, so that rows move."""

    async def together() -> list[list[Completion]]:
        asked = [replace(ask(9, top_logprobs=top), key=top) for top in (0, 2, 20, 5)]
        return await asyncio.wait_for(asyncio.gather(*map(engine.generate, asked)), timeout=60)

    plain, two, all_of_them, five = asyncio.run(together())
    assert {one.top_logprobs for one in plain} == {None}
    for answers, count in ((two, 2), (all_of_them, VOCAB), (five, 5)):
        for one in answers:
            assert {len(top) for top in one.top_logprobs or []} == {count}
            for top, token, log_prob in zip(one.top_logprobs or [], one.tokens, one.logprobs, strict=True):
                assert top.get(token, log_prob) == log_prob


def test_ties_of_top_logprobs_do_not_depend_on_other_rows() -> None:
    """Many tokens are equally likely in bf16."""
    logits = torch.ones(2, 5000)
    logits[:, ::7] = 2.0

    def told(asked: Sequence[int]) -> list[int]:
        rows, count = slice(0, len(asked)), torch.zeros(len(asked), dtype=torch.long)
        top = TopLogprobsRows(len(asked), 1, logits.shape[1], torch.device("cpu"))
        for row, most in enumerate(asked):
            top.set(slice(row, row + 1), most)
        top.record(rows, count, logits[rows], torch.ones(len(asked)), top.most(rows))
        read = torch.cat(top.columns(range(len(asked)), torch.arange(len(asked)), count[:, None]), dim=1)
        first = top.parse(range(len(asked)), read.numpy(), 1)[0]
        assert first is not None
        return [*first[0]]

    assert told([3]) == told([3, 4]) == told([3, 20])


def test_top_logprobs_of_a_resumed_answer_are_refused(policy: Policy) -> None:
    with pytest.raises(Unsupported, match="top_logprobs"):
        generate(engine_of(policy), replace(ask(2, top_logprobs=3), known={0: AnswerPrefix([1], [-1.0], [0])}))


# Streams


def test_stream_reports_tokens_while_they_are_sampled(policy: Policy) -> None:
    made = generate(engine_of(policy), ask())
    deltas = stream(engine_of(policy), ask())
    assert_same(joined(deltas), made)
    first = [delta.sample for delta in deltas[:20]]
    assert len({*first}) > 10  # of all samples that have a row, interleaved
    assert len(deltas) > len(made) * 3


def test_closing_a_stream_cancels_its_request(policy: Policy) -> None:
    engine = engine_of(policy)

    async def read_one() -> None:
        deltas = engine.callers.stream(ask())
        assert (await anext(deltas)).tokens
        load = engine.load
        assert load.running > 8
        assert load.waiting == 8
        assert load.free_pages == load.pages - load.running
        await deltas.aclose()
        assert engine.load.running == engine.load.waiting == 0

    asyncio.run(asyncio.wait_for(read_one(), timeout=60))
    assert not engine.busy


def test_versions_of_a_stream_show_new_weights(engine: Engine) -> None:
    async def read() -> list[Delta]:
        found = []
        async for delta in engine.callers.stream(ask(1, min_new_tokens=24)):
            found.append(delta)
            engine.policy_version = 7
        return found

    (one,) = joined(asyncio.run(asyncio.wait_for(read(), timeout=60)))
    assert one.versions == sorted(one.versions)
    assert one.versions[0] == 0
    assert len(one.versions) == len(one.tokens) == 24


# Refusals


def test_request_that_never_fits_is_refused_before_any_computation(policy: Policy) -> None:
    engine = engine_of(policy)
    with pytest.raises(PromptTooLong):
        engine.callers.stream(replace(ask(), prompt_tokens=[1] * 40))
    with pytest.raises(ValueError, match=r"prompt: 15 is not a token; tokens are 0 to 14"):
        engine.callers.stream(replace(ask(), prompt_tokens=[1, 15, 2]))
    with pytest.raises(ValueError, match=r"prompt: -1 is not a token"):
        engine.submit(replace(ask(), prompt_tokens=[-1]))
    with pytest.raises(ValueError, match=r"sampling.stop_tokens: 99 is not a token"):
        engine.submit(ask(stop_tokens=(3, 99)))
    with pytest.raises(ValueError, match=r"known tokens of sample 1: 15 is not a token"):
        engine.submit(replace(ask(2), known={1: AnswerPrefix([3, 15], [-1.0, -1.0], [0, 0])}))
    with pytest.raises(ValueError, match=r"known tokens of sample 0: 2 tokens have 1 log-probs and 2 versions"):
        engine.submit(replace(ask(2), known={0: AnswerPrefix([3, 3], [-1.0], [0, 0])}))
    wrongs = {"prompt_tokens": [], "num_samples": 0, "top_logprobs": 21, "key": -1}
    for name, value in wrongs.items():
        with pytest.raises(ValueError, match=name.removesuffix("_tokens")):
            replace(ask(), **{name: value})
    assert not engine.busy


def test_duplicate_request_is_refused_and_leaves_the_first_unaffected(policy: Policy) -> None:
    """Their answers could not be distinguished."""
    engine, request = engine_of(policy), ask(2)

    async def twice() -> list[Any]:
        asked = [engine.generate(request), engine.generate(request), engine.generate(request.again())]
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), timeout=60)

    async def streamed_twice() -> list[Delta]:
        streams = [engine.callers.stream(request), engine.callers.stream(request)]
        found = [await anext(streams[0])]
        with pytest.raises(ValueError, match="already being answered"):
            await anext(streams[1])
        return found + [delta async for delta in streams[0]]

    first, second, other = asyncio.run(twice())
    assert "already being answered" in str(second)
    assert_same(first, other)
    assert_same(joined(asyncio.run(asyncio.wait_for(streamed_twice(), timeout=60))), first)
    assert not engine.busy
    engine.submit(request)
    with pytest.raises(ValueError, match="already being answered"):
        engine.submit(request)


def test_stop_strings_without_a_tokenizer_are_refused_by_name(policy: Policy) -> None:
    engine = Engine(policy, tiny_model(), InferenceConfig(max_batch=4), {END})
    with pytest.raises(Unsupported, match=r"sampling\.stop"):
        engine.submit(ask(stop=("a",)))


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ("",)}, {"stop": ("x" * 257,)}, {"stop": tuple("abcdefghijklmnopq")}, {"stop": ("\ufffd",)},
        {"stop": "text"}, {"stop_tokens": (-1,)}, {"stop_tokens": ("1",)}, {"min_new_tokens": 25},
        {"max_new_tokens": 0}, {"temperature": -0.1}, {"top_p": 0.0}, {"top_k": -1}, {"min_p": 1.0},
    ],
    ids=str,
)  # fmt: skip
def test_impossible_parameters_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Sampling(**({"max_new_tokens": 24} | fields))
