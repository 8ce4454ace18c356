"""Resumed answers equal uninterrupted ones: known tokens stay, and the next tokens are those it would have had."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from core_helpers import END, answer_logprobs, tiny_model, tiny_policy
from examples import examples
from family_shapes import QWEN35
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.generate.engine.engine import Engine
from megatron_rl.generate.engine.interface import AnswerPrefix, Completion, GenerationRequest, PartialAnswer
from megatron_rl.model.policy import Policy
from megatron_rl.recipe.inference import InferenceConfig, Sampling

PROMPTS = [[1, 10, 2, 12], [7], [5, 11, 5, 12, 0, 3, 3]]
SAMPLINGS = {
    "greedy": Sampling(temperature=0.0, max_new_tokens=12),
    "plain": Sampling(max_new_tokens=12),
    "cut": Sampling(temperature=0.7, top_k=6, top_p=0.9, min_p=0.05, max_new_tokens=12),
}


@pytest.fixture(scope="module")
def policy(platform: Any, groups: Any) -> Policy:
    return tiny_policy(platform, scale=0.15)


@pytest.fixture(scope="module")
def with_states(platform: Any, groups: Any) -> Policy:
    """A policy whose rows have states beside the cache."""
    return tiny_policy(platform, tiny_model(**QWEN35), scale=0.15)


def engine_of(policy: Policy, max_batch: int = 16, prefill_tokens: int = 16384) -> Engine:
    return Engine(
        policy, policy.model_config, InferenceConfig(max_batch=max_batch, prefill_tokens=prefill_tokens), {END}
    )


def requests(sampling: Sampling, samples: int = 3) -> list[GenerationRequest]:
    return [GenerationRequest(prompt, samples, sampling, key) for key, prompt in enumerate(PROMPTS)]


def answers(engine: Engine, asked: Sequence[GenerationRequest]) -> list[list[Completion]]:
    async def together() -> list[list[Completion]]:
        return await asyncio.wait_for(asyncio.gather(*map(engine.generate, asked)), timeout=60)

    return asyncio.run(together())


def interrupted(engine: Engine, asked: Sequence[GenerationRequest], steps: int) -> list[PartialAnswer]:
    """Return the partial answers after some steps, and drop everything else."""
    for request in asked:
        engine.submit(request)
    for _ in range(steps):
        engine.step()
    found = engine.partial_answers()
    for request in asked:
        engine.cancel(request.id)
    return found


def resumed(asked: Sequence[GenerationRequest], found: Sequence[PartialAnswer]) -> list[GenerationRequest]:
    known: dict[str, dict[int, AnswerPrefix]] = defaultdict(dict)
    for each in found:
        known[each.request_id][each.sample] = each.prefix
    return [replace(one, known=known[one.id]) for one in asked]


def assert_same(
    one: Sequence[Sequence[Completion]], other: Sequence[Sequence[Completion]], within: float = 2e-6
) -> None:
    for some, theirs in zip(one, other, strict=True):
        assert [completion.tokens for completion in some] == [completion.tokens for completion in theirs]
        assert [completion.finish_reason for completion in some] == [each.finish_reason for each in theirs]
        for completion, expected in zip(some, theirs, strict=True):
            assert completion.logprobs == pytest.approx(expected.logprobs, rel=1e-6, abs=within)


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("steps", [1, 3, 7])
def test_interrupted_answer_resumes_to_the_uninterrupted_one(policy: Policy, name: str, steps: int) -> None:
    asked = requests(SAMPLINGS[name], samples=8)
    undisturbed = answers(engine_of(policy), asked)
    found = interrupted(engine_of(policy, max_batch=6), asked, steps)
    assert found
    assert any(1 <= len(each.prefix.tokens) < 12 for each in found)
    assert_same(answers(engine_of(policy), resumed(asked, found)), undisturbed)


def test_states_are_computed_again_when_an_answer_resumes(with_states: Policy) -> None:
    asked = requests(SAMPLINGS["plain"], samples=8)
    undisturbed = answers(engine_of(with_states), asked)
    found = interrupted(engine_of(with_states, max_batch=6), asked, 5)
    assert_same(answers(engine_of(with_states), resumed(asked, found)), undisturbed, within=2e-5)


@examples(8)
@given(
    cuts=st.lists(st.integers(0, 12), min_size=9, max_size=9),
    max_batch=st.integers(1, 12),
    prefill_tokens=st.integers(1, 40),
)
def test_answers_may_be_interrupted_anywhere_independently(
    policy: Policy, cuts: list[int], max_batch: int, prefill_tokens: int
) -> None:
    asked = requests(SAMPLINGS["plain"])
    undisturbed = answers(engine_of(policy), asked)
    cut = [
        replace(
            request,
            known={
                i: AnswerPrefix(completion.tokens[:length], completion.logprobs[:length], completion.versions[:length])
                for i, (completion, length) in enumerate(zip(completions, cuts[3 * request.key :], strict=False))
                if length
            },
        )
        for request, completions in zip(asked, undisturbed, strict=True)
    ]
    assert_same(answers(engine_of(policy, max_batch, prefill_tokens), cut), undisturbed)


def test_known_tokens_and_logprobs_are_returned_unchanged(policy: Policy) -> None:
    """Even tokens that these weights would not sample. Later tokens have log-probs of these weights."""
    known = AnswerPrefix([3, 3, 3], [-1.25, -2.5, -0.0625], [0, 0, 0])
    request = GenerationRequest(PROMPTS[0], 2, SAMPLINGS["plain"], 5, known={1: known})
    ((_, completion),) = answers(engine_of(policy), [request])
    assert completion.tokens[:3] == [3, 3, 3]
    assert completion.logprobs[:3] == [-1.25, -2.5, -0.0625]
    assert len(completion.tokens) > 3
    expected = answer_logprobs(policy, PROMPTS[0], completion.tokens)[3:]
    torch.testing.assert_close(torch.tensor(completion.logprobs[3:]), expected, rtol=1e-5, atol=1e-5)


def test_every_token_reports_the_weights_that_sampled_it(policy: Policy) -> None:
    """Tokens are of an earlier attempt, and from before and after a publication."""
    engine = engine_of(policy)
    engine.policy_version = 8
    known = {0: AnswerPrefix([3, 3], [-1.0, -1.0], [4, 5])}
    request = GenerationRequest(PROMPTS[0], 4, Sampling(max_new_tokens=12), 7, known=known)
    engine.submit(request)
    for _ in range(3):
        engine.step()
    engine.policy_version = 9
    while engine.busy:
        engine.step()
    resumed, *fresh = engine.take(request.id) or []
    assert resumed.versions == [4, 5, 8, 8, 8, *[9] * (len(resumed.tokens) - 5)]
    for completion in fresh:
        assert completion.versions == [8, 8, 8, *[9] * 12][: len(completion.tokens)]
    assert any(len(completion.tokens) > 3 for completion in fresh)
    assert len(resumed.tokens) > 5


def test_complete_known_answers_need_no_work(policy: Policy) -> None:
    engine = engine_of(policy)
    known = {0: AnswerPrefix([3, END], [-1.0, -2.0], [1, 1]), 1: AnswerPrefix([2] * 12, [-1.0] * 12, [2] * 12)}
    (completions,) = answers(engine, [GenerationRequest(PROMPTS[0], 2, SAMPLINGS["plain"], 0, known=known)])
    assert [completion.finish_reason for completion in completions] == ["stop", "length"]
    assert [completion.tokens for completion in completions] == [[3, END], [2] * 12]
    assert engine.busy_s == 0.0


def test_finished_answer_is_partial_work_until_its_siblings_are_finished(policy: Policy) -> None:
    """Otherwise it would be lost with the request. Once that is answered, there is none."""
    engine = engine_of(policy)
    asked = requests(SAMPLINGS["plain"], samples=8)
    found = interrupted(engine, asked, steps=8)
    ended = [each for each in found if each.prefix.tokens[-1] == END]
    assert ended
    assert len({(each.request_id, each.sample) for each in found}) == len(found)
    again = engine_of(policy)
    answers(again, asked)
    assert again.partial_answers() == []


def test_evicted_answers_are_partial_work(policy: Policy) -> None:
    """Answers wait for the end of training, for pages, or for their first row; an attempt that ends then must keep
    them."""
    known = AnswerPrefix([3, 3], [-1.0, -1.0], [0, 0])
    asked = [*requests(SAMPLINGS["plain"]), GenerationRequest([8], 2, SAMPLINGS["plain"], 7, known={1: known})]
    engine = engine_of(policy, max_batch=8)
    for request in asked:
        engine.submit(request)
    engine.step()
    engine.step()

    def found() -> dict[tuple[str, int], AnswerPrefix]:
        return {(each.request_id, each.sample): each.prefix for each in engine.partial_answers()}

    before = found()
    assert engine.load.running and engine.load.waiting
    assert before[asked[-1].id, 1] == known
    engine.end_phase()
    assert not engine.load.running
    assert found() == before
