"""Answers of the engine are those of the model, whatever else it decodes at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from core_helpers import END, VOCAB, answer_logprobs, full_forward, tiny_model, tiny_policy

from megatron_rl.generate.engine.engine import Engine
from megatron_rl.generate.engine.interface import Completion, GenerationRequest, PromptTooLong
from megatron_rl.model.policy import Policy
from megatron_rl.recipe.inference import InferenceConfig, Sampling

GREEDY = Sampling(temperature=0.0, max_new_tokens=12)
CUT = Sampling(temperature=0.7, top_k=6, top_p=0.9, min_p=0.05, max_new_tokens=12)
PROMPTS = [[1, 10, 2, 12], [7], [5, 11, 5, 12, 0, 3, 3], [1, 10, 2, 12], [9, 9], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]]


@pytest.fixture(scope="module")
def policy(platform: Any, groups: Any) -> Policy:
    """Sharp enough that greedy answers have no near ties, flat enough that answers end at very different lengths."""
    return tiny_policy(platform, scale=0.15)


def engine_of(policy: Policy, **config: int) -> Engine:
    return Engine(policy, tiny_model(), InferenceConfig(**({"max_batch": 16} | config)), {END})


def ask(
    prompt: Sequence[int], samples: int = 1, sampling: Sampling = GREEDY, key: int = 0, **cut: float
) -> GenerationRequest:
    return GenerationRequest(list(prompt), samples, sampling.model_copy(update=cut), key)


def answer(engine: Engine, *requests: GenerationRequest) -> list[list[Completion]]:
    """Answer all requests at once; a hanging test ends within seconds."""

    async def together() -> list[list[Completion]]:
        return await asyncio.wait_for(asyncio.gather(*map(engine.generate, requests)), timeout=60)

    return asyncio.run(together())


def tokens_of(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.tokens for completion in completions]


def greedy_without_cache(policy: Policy, prompt: Sequence[int], limit: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < limit and END not in tokens:
        tokens.append(int(full_forward(policy, [*prompt, *tokens])[-1].argmax()))
    return tokens


# Content of answers


EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 24}


NORMED = {"qk_norm": True, "qkv_bias": False, "head_dim": 12}


@pytest.mark.parametrize("shape", [{}, {"dtype": "bf16"}, EXPERTS, NORMED], ids=["fp32", "bf16", "experts", "normed"])
def test_greedy_equals_a_forward_without_cache_token_for_token(
    platform: Any, groups: Any, shape: dict[str, Any]
) -> None:
    model = tiny_model(tied_embeddings=False, **shape)
    policy = tiny_policy(platform, model, scale=0.3)  # without near ties, which bf16 would break
    engine = Engine(policy, model, InferenceConfig(max_batch=16), {END})
    answers = answer(engine, *(ask(prompt) for prompt in PROMPTS))
    expected = [greedy_without_cache(policy, prompt, 12) for prompt in PROMPTS]
    assert [tokens_of(completions) for completions in answers] == [[tokens] for tokens in expected]
    assert len({token for tokens in expected for token in tokens}) > 5


@pytest.mark.parametrize("sampling", [CUT, Sampling(max_new_tokens=12), GREEDY], ids=["cut", "plain", "greedy"])
def test_logprobs_equal_those_of_a_full_forward_before_any_cut(policy: Policy, sampling: Sampling) -> None:
    answers = answer(engine_of(policy), *(ask(prompt, 3, sampling, key) for key, prompt in enumerate(PROMPTS)))
    for prompt, completions in zip(PROMPTS, answers, strict=True):
        for completion in completions:
            expected = answer_logprobs(policy, prompt, completion.tokens, sampling.temperature or 1.0)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=1e-5, atol=1e-5)


def test_first_tokens_are_as_frequent_as_they_are_likely(policy: Policy) -> None:
    draws = 4000
    request = ask(PROMPTS[0], draws, Sampling(max_new_tokens=1, temperature=1.3), key=17)
    (completions,) = answer(engine_of(policy, max_batch=512), request)
    counts = torch.bincount(torch.tensor([c.tokens[0] for c in completions]), minlength=VOCAB)
    expected = draws * (full_forward(policy, PROMPTS[0])[-1] / 1.3).softmax(-1)
    assert expected.min() > 5  # the chi-square test needs these counts
    assert (
        (counts - expected) ** 2 / expected
    ).sum().item() < 42.6  # exceeded with probability 1e-4 at 14 degrees of freedom


# Independence of answers


def test_answers_do_not_depend_on_neighbours_order_or_batch_size(policy: Policy) -> None:
    requests = [
        ask(prompt, 2 + key, CUT if key % 2 else Sampling(max_new_tokens=3 + key), key)
        for key, prompt in enumerate(PROMPTS)
    ]
    alone = [tokens_of(*answer(engine_of(policy), request)) for request in requests]
    for config in ({}, {"max_batch": 3}, {"max_batch": 64}, {"prefill_tokens": 1}):
        together = answer(engine_of(policy, **config), *requests)
        assert [tokens_of(completions) for completions in together] == alone, config
    backwards = answer(engine_of(policy, max_batch=5), *reversed(requests))
    assert [tokens_of(completions) for completions in reversed(backwards)] == alone


@pytest.mark.parametrize("tokens", [2, 5, 16])
def test_answers_do_not_depend_on_how_often_the_host_checks_for_ended_rows(
    policy: Policy, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither do rows that end between two checks, nor rows that replace them. Partial answers in between never contain
    more than the final answer."""
    requests = [
        ask(prompt, 2 + key, CUT if key % 2 else Sampling(max_new_tokens=1 + key), key)
        for key, prompt in enumerate(PROMPTS)
    ]
    expected = [tokens_of(completions) for completions in answer(engine_of(policy, max_batch=5), *requests)]
    monkeypatch.setattr(policy.kernels, "tokens_between_syncs", tokens)
    found = answer(engine_of(policy, max_batch=5), *requests)
    assert [tokens_of(completions) for completions in found] == expected
    whole = {
        (request.id, sample): answered
        for request, answers in zip(requests, expected, strict=True)
        for sample, answered in enumerate(answers)
    }
    engine = engine_of(policy, max_batch=5)
    for request in requests:
        engine.submit(request)
    while engine.busy:
        engine.step()
        for part in engine.partial_answers():
            so_far = part.prefix.tokens
            assert so_far == whole[part.request_id, part.sample][: len(so_far)]


def test_parameters_of_requests_in_one_batch_do_not_mix(policy: Policy) -> None:
    """Greedy requests stay greedy beside hot ones, top_k=1 is greedy too, and each request has its own limits."""
    requests = [ask(PROMPTS[0], 4), ask(PROMPTS[0], 4, Sampling(temperature=3.0, max_new_tokens=5), 1)]
    requests.append(ask(PROMPTS[0], 4, Sampling(top_k=1, max_new_tokens=12), 2))
    greedy, hot, top = map(tokens_of, answer(engine_of(policy), *requests))
    expected = greedy_without_cache(policy, PROMPTS[0], 12)
    assert greedy == top == [expected] * 4
    assert all(len(tokens) <= 5 for tokens in hot)
    assert len(set(map(tuple, hot))) > 1


# End of an answer


def test_answer_ends_with_the_end_token_or_at_its_limit(policy: Policy) -> None:
    (completions,) = answer(engine_of(policy), ask(PROMPTS[0], 64, Sampling(max_new_tokens=12), 3))
    reasons = {completion.finish_reason for completion in completions}
    assert reasons == {"stop", "length"}
    for completion in completions:
        assert len(completion.logprobs) == len(completion.tokens)
        assert END not in completion.tokens[:-1]
        assert (completion.finish_reason == "stop") == (completion.tokens[-1] == END)
        assert len(completion.tokens) == 12 or completion.finish_reason == "stop"


def test_too_long_prompt_is_one_clear_error_and_leaves_others_unaffected(policy: Policy) -> None:
    engine = engine_of(policy)

    async def together() -> list[Any]:
        requests = [ask(PROMPTS[0]), ask([1] * 40), ask(PROMPTS[1])]
        return await asyncio.wait_for(asyncio.gather(*map(engine.generate, requests), return_exceptions=True), 60)

    first, error, last = asyncio.run(together())
    assert isinstance(error, PromptTooLong)
    for part in ("40 tokens", "max_new_tokens 12", "max_position_embeddings 48"):
        assert part in str(error)
    assert tokens_of(first) == [greedy_without_cache(policy, PROMPTS[0], 12)]
    assert tokens_of(last) == [greedy_without_cache(policy, PROMPTS[1], 12)]


def test_sequence_length_of_the_recipe_is_the_limit(policy: Policy) -> None:
    engine = Engine(policy, tiny_model(), InferenceConfig(max_batch=4), {END}, max_length=20)
    (fits,) = answer(engine, ask([1] * 8))
    assert tokens_of(fits) == [greedy_without_cache(policy, [1] * 8, 12)]
    with pytest.raises(PromptTooLong, match=r"9 tokens .*max_new_tokens 12 exceed training.sequence_length 20"):
        answer(engine, ask([1] * 9))


# Changes over time


def test_requests_may_arrive_while_others_are_decoded(policy: Policy) -> None:
    """The second prompt contains the first answer, like the next turn of an agent."""
    engine = engine_of(policy, max_batch=3)

    async def two_turns(prompt: list[int]) -> tuple[list[int], list[int]]:
        (first,) = await engine.generate(ask(prompt, max_new_tokens=4))
        (second,) = await engine.generate(ask([*prompt, *first.tokens], max_new_tokens=4))
        return first.tokens, second.tokens

    async def all_agents() -> list[tuple[list[int], list[int]]]:
        return await asyncio.wait_for(asyncio.gather(*map(two_turns, PROMPTS)), timeout=60)

    for prompt, (first, second) in zip(PROMPTS, asyncio.run(all_agents()), strict=True):
        assert first == greedy_without_cache(policy, prompt, 4)
        assert second == greedy_without_cache(policy, [*prompt, *first], 4)


def test_new_weights_are_used_and_reported_immediately(platform: Any, groups: Any) -> None:
    policy = tiny_policy(platform, scale=0.15)
    engine = engine_of(policy)
    (before,) = answer(engine, ask(PROMPTS[0]))
    with torch.no_grad():
        policy.embedding.word_embeddings.weight.mul_(-1)
    engine.policy_version = 7
    (after,) = answer(engine, ask(PROMPTS[0]))
    assert (set(before[0].versions), set(after[0].versions)) == ({0}, {7})
    assert tokens_of(after) == [greedy_without_cache(policy, PROMPTS[0], 12)] != tokens_of(before)


def test_no_copy_of_the_weights_outlives_a_phase(platform: Any, groups: Any) -> None:
    """Training changes the weights, and needs the memory."""
    policy = tiny_policy(platform, scale=0.15)
    engine = engine_of(policy)
    (before,) = answer(engine, ask(PROMPTS[0]))
    engine.end_phase()
    with torch.no_grad():
        policy.embedding.word_embeddings.weight.mul_(-1)
    (after,) = answer(engine, ask(PROMPTS[0]))
    assert tokens_of(after) == [greedy_without_cache(policy, PROMPTS[0], 12)] != tokens_of(before)


def test_error_of_a_step_reaches_every_caller_and_the_engine_recovers(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some requests are being decoded and some wait: none of them hangs."""
    engine = engine_of(policy, max_batch=2)
    whole_logits, calls = policy.whole_logits, 0

    def fails_the_third_time(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("out of memory")
        return whole_logits(*args)

    async def together() -> list[Any]:
        requests = [ask(prompt, 2, top_k=0) for prompt in PROMPTS]
        return await asyncio.wait_for(asyncio.gather(*map(engine.generate, requests), return_exceptions=True), 60)

    with monkeypatch.context() as patch:
        patch.setattr(policy, "whole_logits", fails_the_third_time)
        outcomes = asyncio.run(together())
    errors = [outcome for outcome in outcomes if isinstance(outcome, RuntimeError)]
    assert len(errors) >= len(PROMPTS) - 1
    assert {str(error) for error in errors} == {"out of memory"}
    (completions,) = answer(engine, ask(PROMPTS[0]))
    assert tokens_of(completions) == [greedy_without_cache(policy, PROMPTS[0], 12)]


def test_cancelled_caller_leaves_no_row_behind(policy: Policy) -> None:
    """Its samples may be decoded, wait for a row, or both."""
    engine = engine_of(policy, max_batch=5)

    async def give_up() -> None:
        callers = [asyncio.create_task(engine.generate(ask(prompt, 4))) for prompt in PROMPTS]
        while not engine.partial_answers():
            await asyncio.sleep(0)
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)

    asyncio.run(give_up())
    assert not engine.busy
    assert engine.partial_answers() == []
    (completions,) = answer(engine, ask(PROMPTS[1], 5))
    assert tokens_of(completions) == [greedy_without_cache(policy, PROMPTS[1], 12)] * 5


def test_engine_outlives_the_loops_that_use_it(policy: Policy) -> None:
    """One loop is closed during an answer, one resumes it, and one has none."""
    engine = engine_of(policy)

    async def a_moment() -> None:
        asyncio.get_running_loop().create_task(engine.generate(ask(PROMPTS[2], 3)))
        while not engine.partial_answers():
            await asyncio.sleep(0)

    asyncio.run(a_moment())  # closing the loop cancels its requests
    with asyncio.Runner() as runner:
        for prompt in PROMPTS[:2]:
            assert tokens_of(runner.run(engine.generate(ask(prompt)))) == [greedy_without_cache(policy, prompt, 12)]
    request_id = engine.submit(ask(PROMPTS[3]))
    assert engine.take(request_id) is None
    while engine.busy:
        engine.step()
    completions = engine.take(request_id)
    assert completions is not None
    assert tokens_of(completions) == [greedy_without_cache(policy, PROMPTS[3], 12)]
    assert engine.take(request_id) is None
