"""The engine returns the experts that its routers chose for every token that it computed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from core_helpers import END, choices_of, experts_in, tiny_model, tiny_policy

from megatron_rl.generate.engine.engine import Engine
from megatron_rl.generate.engine.interface import AnswerPrefix, Completion, GenerationRequest
from megatron_rl.model.policy import Policy
from megatron_rl.recipe.inference import InferenceConfig, Sampling

EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 24, "tied_embeddings": False}
MODEL = tiny_model(**EXPERTS, router_replay="rollout")
PROMPTS = [[1, 10, 2, 12], [7], [5, 11, 5, 12, 0, 3, 3, 1, 1, 4, 6, 2, 8, 8, 10, 3, 9, 5, 5, 0]]
SAMPLING = Sampling(max_new_tokens=12)


@pytest.fixture(scope="module")
def policy(platform: Any, groups: Any) -> Policy:
    return tiny_policy(platform, MODEL, scale=0.3)


def engine_of(policy: Policy, model: Any = MODEL, **config: Any) -> Engine:
    return Engine(policy, model, InferenceConfig(**({"max_batch": 16} | config)), {END})


def answers(engine: Engine, asked: Sequence[GenerationRequest]) -> list[list[Completion]]:
    async def together() -> list[list[Completion]]:
        return await asyncio.wait_for(asyncio.gather(*map(engine.generate, asked)), timeout=60)

    return asyncio.run(together())


def requests(samples: int = 3) -> list[GenerationRequest]:
    return [GenerationRequest(prompt, samples, SAMPLING, key) for key, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize(
    "config", [{}, {"prefill_tokens": 16, "page_tokens": 4}, {"max_batch": 2}, {"share_prefixes": False}], ids=str
)
def test_choices_of_prompt_and_answer_are_those_of_a_pass_over_both(policy: Policy, config: dict[str, Any]) -> None:
    asked = requests()
    for request, completions in zip(asked, answers(engine_of(policy, **config), asked), strict=True):
        for one in completions:
            computed = [*request.prompt_tokens, *one.tokens][:-1]
            assert experts_in(MODEL, one.choices) == experts_in(MODEL, choices_of(policy, MODEL, computed))


def test_a_prompt_found_in_the_cache_has_the_choices_of_the_pass_that_computed_it(policy: Policy) -> None:
    engine = engine_of(policy, page_tokens=4)
    first, second = (answers(engine, [GenerationRequest(PROMPTS[2], 1, SAMPLING, key)])[0][0] for key in (1, 2))
    assert engine.scheduler.prefilled_tokens < 2 * len(PROMPTS[2])
    assert first.choices[: len(PROMPTS[2])] == second.choices[: len(PROMPTS[2])]


def test_a_stop_string_leaves_out_the_choices_of_tokens_behind_it(policy: Policy) -> None:
    whole = answers(engine_of(policy), requests(1))[0][0]
    sampling = SAMPLING.model_copy(update={"stop": ("x",)})
    engine = Engine(policy, MODEL, InferenceConfig(max_batch=4), {END}, decode=lambda ids: "x" if len(ids) > 2 else "")
    cut = answers(engine, [replace(requests(1)[0], sampling=sampling)])[0][0]
    assert len(cut.tokens) < len(whole.tokens)
    assert cut.choices == whole.choices[: len(PROMPTS[0]) + len(cut.tokens) - 1]


def test_a_token_keeps_the_choices_of_the_weights_that_first_computed_it(platform: Any, groups: Any) -> None:
    policy = tiny_policy(platform, MODEL, scale=0.3)
    engine = engine_of(policy)
    asked = requests()
    for request in asked:
        engine.submit(request)
    for _ in range(5):
        engine.step()
    before = {(each.request_id, each.sample): each.prefix for each in engine.partial_answers()}
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if "router" in name:
                weight.copy_(-weight)  # other experts for every token
    engine.policy_version = 1
    engine.restart_rows()  # prompts and tokens so far are computed again
    while engine.busy:
        engine.step()
    for request in asked:
        for sample, one in enumerate(engine.take(request.id) or ()):
            known = before[request.id, sample]
            assert one.choices[: len(known.choices)] == known.choices
            assert len(one.choices) == len(request.prompt_tokens) + len(one.tokens) - 1
            if len(one.tokens) > len(known.tokens):
                again = choices_of(policy, MODEL, [*request.prompt_tokens, *one.tokens][:-1])
                assert experts_in(MODEL, one.choices[len(known.choices) :]) == experts_in(
                    MODEL, again[len(known.choices) :]
                )
                assert experts_in(MODEL, known.choices) != experts_in(MODEL, again[: len(known.choices)])


def test_choices_that_an_earlier_engine_did_not_return_come_from_the_pass_that_resumes(policy: Policy) -> None:
    asked = requests(1)
    undisturbed = answers(engine_of(policy), asked)[2][0]
    gap = undisturbed.choices[:5] + [b""] * 3 + undisturbed.choices[8:10]
    known = AnswerPrefix(undisturbed.tokens[:4], undisturbed.logprobs[:4], undisturbed.versions[:4], gap)
    resumed = answers(engine_of(policy), [replace(asked[2], known={0: known})])[0][0]
    assert resumed.tokens == undisturbed.tokens
    assert experts_in(MODEL, resumed.choices) == experts_in(MODEL, undisturbed.choices)


def test_deltas_joined_are_the_choices_of_the_answer(policy: Policy) -> None:
    whole = answers(engine_of(policy), requests(1))[2][0]
    engine = engine_of(policy)
    engine.submit(requests(1)[2], streamed=True)
    deltas = []
    while engine.busy:
        engine.step()
        deltas += [delta for _, delta in engine.take_deltas()]
    assert len(deltas) > 2
    assert [each for delta in deltas for each in delta.choices] == whole.choices


def test_without_replay_nothing_is_recorded(policy: Policy) -> None:
    engine = engine_of(policy, tiny_model(**EXPERTS))
    assert all(not one.choices for completions in answers(engine, requests()) for one in completions)
