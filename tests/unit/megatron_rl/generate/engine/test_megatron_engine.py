"""megatron-core's engine gives the same answers as this project's own engine, with the same weights."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from core_helpers import END, VOCAB, answer_logprobs, build_run, full_forward, stir, tiny_model, tiny_policy, tiny_run
from megatron_engine_on_cpu import megatron_engine_on_cpu

from megatron_rl.generate.engine.engine import Engine
from megatron_rl.generate.engine.interface import (
    AnswerPrefix,
    Completion,
    GenerationRequest,
    RankEngine,
    Unsupported,
)
from megatron_rl.generate.engine.megatron_engine import MegatronEngine
from megatron_rl.model.policy import Policy
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.inference import InferenceConfig, Sampling

GREEDY = Sampling(temperature=0.0, max_new_tokens=12)
PROMPTS = [[1, 10, 2, 12], [7], [5, 11, 5, 12, 0, 3, 3], [1, 10, 2, 12], [9, 9], [*range(10)]]


@pytest.fixture(scope="module", autouse=True)
def on_cpu() -> Iterator[None]:
    with megatron_engine_on_cpu():
        yield


@pytest.fixture(scope="module")
def policy(platform: Any, groups: Any) -> Policy:
    return tiny_policy(platform, scale=0.15)


def decode(tokens: Sequence[int]) -> str:
    return "".join("0123456789+-="[token] for token in tokens if token < END)


def engines(policy: Policy, **config: Any) -> tuple[RankEngine, RankEngine]:
    """megatron-core's engine and this project's."""
    sizes = InferenceConfig(**({"max_batch": 8, "page_tokens": 4} | config))
    return (
        MegatronEngine(policy, tiny_model(), sizes, {END}, decode=decode),
        Engine(policy, tiny_model(), sizes, {END}, decode=decode),
    )


def ask(prompt: Sequence[int], samples: int = 1, sampling: Sampling = GREEDY, **fields: Any) -> GenerationRequest:
    return GenerationRequest([*prompt], samples, sampling, **({"key": 0} | fields))


def answer(engine: RankEngine, *requests: GenerationRequest) -> list[list[Completion]]:
    """Answer all requests at once, in one phase."""

    async def together() -> list[list[Completion]]:
        return await asyncio.wait_for(asyncio.gather(*map(engine.generate, requests)), timeout=120)

    answers = asyncio.run(together())
    engine.end_phase()
    return answers


def assert_alike(theirs: list[list[Completion]], ours: list[list[Completion]]) -> None:
    for mine, other in zip((each for group in ours for each in group), (e for g in theirs for e in g), strict=True):
        assert other.tokens == mine.tokens
        assert (other.finish_reason, other.stop, other.versions) == (mine.finish_reason, mine.stop, mine.versions)
        torch.testing.assert_close(torch.tensor(other.logprobs), torch.tensor(mine.logprobs), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"qk_norm": True, "qkv_bias": False, "head_dim": 12, "tied_embeddings": False},
        {"rope_scaling": {"factor": 8.0, "original_max_position_embeddings": 16}},
        {"lora": {"rank": 2, "alpha": 2.0}},
    ],
    ids=["tied", "normed", "stretched", "adapters"],
)
def test_greedy_answers_and_logprobs_equal_those_of_the_native_engine(
    platform: Any, groups: Any, shape: dict[str, Any]
) -> None:
    model = tiny_model(**shape)
    policy = tiny_policy(platform, model, scale=0.15)
    config = InferenceConfig(max_batch=4, page_tokens=4, prefill_tokens=32)
    requests = [
        ask(prompt) for prompt in (*PROMPTS, [5] * 30, [*range(13)] * 2, [2] * 20)
    ]  # some prompts are computed in pieces
    theirs = answer(MegatronEngine(policy, model, config, {END}), *requests)
    ours = answer(Engine(policy, model, config, {END}), *requests)
    assert_alike(theirs, ours)
    assert len({token for (one,) in ours for token in one.tokens}) > 3


def test_evicted_answers_resume_later(policy: Policy) -> None:
    long = Sampling(temperature=0.0, max_new_tokens=30)
    theirs, ours = engines(policy, cache_tokens=48)
    requests = [ask([3], sampling=long), ask([9, 9], sampling=long), ask([4, 2], sampling=long)]
    assert_alike(answer(theirs, *requests), answer(ours, *requests))


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_are_of_the_temperature_before_any_cut(policy: Policy, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, top_p=0.9, max_new_tokens=12)
    theirs, _ = engines(policy)
    answers = answer(theirs, *(ask(prompt, 3, sampling) for prompt in PROMPTS))
    for prompt, completions in zip(PROMPTS, answers, strict=True):
        for each in completions:
            expected = answer_logprobs(policy, prompt, each.tokens, temperature)
            torch.testing.assert_close(torch.tensor(each.logprobs), expected, rtol=1e-5, atol=1e-5)
            assert len(each.tokens) == len(each.versions)


def test_first_tokens_are_as_frequent_as_they_are_likely_and_padding_never_appears(policy: Policy) -> None:
    draws = 2000
    theirs, _ = engines(policy, max_batch=500)
    (completions,) = answer(theirs, ask(PROMPTS[0], draws, Sampling(max_new_tokens=1, temperature=1.3), key=17))
    counts = torch.bincount(torch.tensor([each.tokens[0] for each in completions]), minlength=VOCAB)
    expected = draws * (full_forward(policy, PROMPTS[0])[-1] / 1.3).softmax(-1)
    assert expected.min() > 5  # the chi-square test needs these counts
    assert (
        (counts - expected) ** 2 / expected
    ).sum().item() < 42.6  # exceeded with probability 1e-4 at 14 degrees of freedom


def test_further_end_tokens_and_stop_strings_end_answers(policy: Policy) -> None:
    theirs, ours = engines(policy)
    plain = [one.tokens for (one,) in answer(ours, *map(ask, PROMPTS))]
    cut = [
        ask(prompt, sampling=Sampling(temperature=0.0, max_new_tokens=12, **ends))
        for prompt, tokens in zip(PROMPTS, plain, strict=True)
        for ends in ({"stop_tokens": (tokens[3],)}, {"stop": (decode(tokens[2:5]),)})
    ]
    reference = answer(ours, *cut)
    assert_alike(answer(theirs, *cut), reference)
    assert {one.finish_reason for (one,) in reference} == {"stop"}


def test_answers_resume_from_known_tokens(policy: Policy) -> None:
    theirs, ours = engines(policy)
    ((whole,),) = answer(ours, ask(PROMPTS[4]))
    begun = {count: AnswerPrefix(whole.tokens[:count], whole.logprobs[:count], [0] * count) for count in (1, 5, 12)}
    requests = [ask(PROMPTS[4], known={0: known}) for known in begun.values()]
    theirs.policy_version = 3
    for count, (one,) in zip(begun, answer(theirs, *requests), strict=True):
        assert one.tokens == whole.tokens
        assert one.versions == [0] * count + [3] * (len(one.tokens) - count)


def test_partial_answers_are_reported_while_they_are_sampled(policy: Policy) -> None:
    theirs, ours = engines(policy)
    (whole,) = answer(ours, ask(PROMPTS[4], samples=2))

    async def told_halfway() -> list[list[int]]:
        asked = asyncio.create_task(theirs.generate(ask(PROMPTS[4], samples=2)))
        told: list[list[int]] = []
        while not told or len(told[0]) < 4:
            await asyncio.sleep(0)
            told = [part.prefix.tokens for part in theirs.partial_answers()]
        await asked
        return told

    assert asyncio.run(told_halfway()) == [each.tokens[:4] for each in whole]
    assert theirs.partial_answers() == []
    theirs.end_phase()


def test_cancelled_request_frees_its_room_even_in_the_middle_of_its_prompt(platform: Any, groups: Any) -> None:
    model = tiny_model(max_position_embeddings=256)
    policy, config = tiny_policy(platform, model, scale=0.15), InferenceConfig(max_batch=8, prefill_tokens=32)
    theirs = MegatronEngine(policy, model, config, {END})
    prompts = [[5] * 30, [*range(13)] * 2, [2] * 200]  # 64 tokens a step, after megatron-core's rounding
    kept = answer(Engine(policy, model, config, {END}), *map(ask, prompts[:2]))

    async def cancel(tokens: int) -> list[list[Completion]]:
        asked = [asyncio.create_task(theirs.generate(ask(prompt))) for prompt in prompts]
        while sum(len(part.prefix.tokens) for part in theirs.partial_answers()) < tokens:
            await asyncio.sleep(0)
        asked[2].cancel()
        answers = [await each for each in asked[:2]]
        assert theirs._core.requests == {}
        theirs.end_phase()
        return answers

    for tokens in (2, 8):  # before and after its first token
        assert_alike(asyncio.run(cancel(tokens)), kept)


def test_cache_is_freed_at_the_end_of_a_phase_without_garbage_collection(policy: Policy) -> None:
    theirs, _ = engines(policy)
    asyncio.run(theirs.generate(ask([1])))
    assert isinstance(theirs, MegatronEngine)
    cache = weakref.ref(theirs._core.context.memory_buffer)
    gc.disable()
    try:
        theirs.end_phase()
        assert cache() is None
    finally:
        gc.enable()


def test_next_phase_samples_with_the_trained_weights(platform: Any, groups: Any) -> None:
    policy = tiny_policy(platform, scale=0.15)
    theirs, ours = engines(policy)
    before = answer(theirs, *map(ask, PROMPTS))
    stir(policy, 0.15, seed=3)
    theirs.policy_version = ours.policy_version = 1
    after = answer(theirs, *map(ask, PROMPTS))
    assert_alike(after, answer(ours, *map(ask, PROMPTS)))
    assert [one.tokens for (one,) in before] != [one.tokens for (one,) in after]


def test_run_rolls_out_and_trains_with_it_as_with_the_native_engine(platform: Any, groups: Any) -> None:
    native = tiny_run(sampling={"max_new_tokens": 3, "temperature": 0.0}, inference={"page_tokens": 4})
    theirs = native.model_copy(update={"inference": native.inference.model_copy(update={"engine": "megatron"})})
    runs = [build_run(config, platform, groups) for config in (theirs, native)]
    assert isinstance(runs[0].engine, MegatronEngine)
    for _ in range(2):  # in the second step the engine has the weights of the first
        collected = [run.driver.collect(run.next_ordinal) for run in runs]
        tokens = [[each.tokens for group in batch.groups for each in group.trajectories] for batch in collected]
        assert tokens[0] == tokens[1]
        for run, batch in zip(runs, collected, strict=True):
            run.trainer.train(batch, 1)
            run.refit.publish(run.trainer.policy_version)
            run.next_ordinal = batch.next_ordinal
    assert runs[0].engine.policy_version == runs[1].engine.policy_version > 0
    for run in runs:
        run.generation.loop.close()


@pytest.mark.parametrize(
    ("sampling", "fields", "named"),
    [
        ({"min_p": 0.1}, {}, "min_p"),
        ({"min_new_tokens": 2}, {}, "min_new_tokens"),
        ({"top_k": 3, "top_p": 0.9}, {}, "top_k together with top_p"),
        ({}, {"top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_unsupported_parameters_are_refused_by_name(
    policy: Policy, sampling: dict[str, Any], fields: dict[str, Any], named: str
) -> None:
    theirs, _ = engines(policy)
    with pytest.raises(Unsupported, match=named):
        answer(theirs, ask([1], sampling=Sampling(max_new_tokens=3, **sampling), **fields))


def test_missing_packages_are_named(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer import attention

    monkeypatch.setattr(attention, "is_fa_min_version", lambda _: False)
    monkeypatch.setattr(attention, "rearrange", None)
    with pytest.raises(ConfigurationError, match=r"flash-attn 2\.7\.3 or later and einops.*inference\.engine=native"):
        engines(policy)
