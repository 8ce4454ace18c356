"""Our own server used as an engine: its answers are those of the engine behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import httpx
import pytest
from core_helpers import ALPHABET, tiny_model, tiny_policy
from server_helpers import running
from streams import assert_same, joined

from megatron_rl.errors import ConfigurationError
from megatron_rl.inference.api import GenerationRequest, PromptTooLong
from megatron_rl.inference.config import InferenceConfig, Sampling
from megatron_rl.inference.engine import Engine
from megatron_rl.inference.openai import OpenAIInference
from megatron_rl.inference.openai_bodies import Endpoint
from megatron_rl.model.policy import Policy
from megatron_rl.model.tokenizer import CharacterTokenizer

TOKENIZER = CharacterTokenizer(ALPHABET)
MODEL = tiny_model()
ENDPOINT = Endpoint("http://server/v1", "tiny", "mrl", token_variable="TOKEN_OF_THE_TEST")
Result = TypeVar("Result")


@pytest.fixture
def policy(platform: Any, groups: Any, monkeypatch: pytest.MonkeyPatch) -> Policy:
    monkeypatch.setenv("TOKEN_OF_THE_TEST", "s3cret")
    return tiny_policy(platform, scale=0.15)


def engine_of(policy: Policy) -> Engine:
    engine = Engine(policy, MODEL, InferenceConfig(max_batch=8), TOKENIZER.end_ids, decode=TOKENIZER.decode)
    engine.policy_version = 5
    return engine


def ask(policy: Policy, work: Callable[[OpenAIInference], Awaitable[Result]], token: str = "s3cret") -> Result:
    async def asked() -> Result:
        options = {"tokenizer": TOKENIZER, "max_length": MODEL.max_position_embeddings, "tokens": [token]}
        async with running(engine_of(policy), **options) as application:
            transport = httpx.ASGITransport(application, raise_app_exceptions=False)
            async with OpenAIInference(ENDPOINT, TOKENIZER, transport=transport) as inference:
                return await asyncio.wait_for(work(inference), timeout=60)

    return asyncio.run(asked())


def requests() -> Sequence[GenerationRequest]:
    plain = Sampling(max_new_tokens=12)
    cut = Sampling(temperature=0.7, top_k=6, top_p=0.9, min_p=0.05, max_new_tokens=12, min_new_tokens=4)
    stops = Sampling(max_new_tokens=24, stop=("2", "-1"), stop_tokens=(5,))
    prompt = [1, 10, 2, 12]
    asked = [GenerationRequest(prompt, 5, each, 2**64 - 7 - number) for number, each in enumerate((plain, cut, stops))]
    return [*asked, GenerationRequest(prompt, 2, cut, 3, top_logprobs=2)]


def test_answers_equal_those_of_the_engine(policy: Policy) -> None:
    async def both(inference: OpenAIInference) -> list[Any]:
        found = []
        for request in requests():
            found.append(
                (await inference.generate(request), joined([part async for part in inference.stream(request)]))
            )
        return found

    engine = engine_of(policy)
    for request, (whole, streamed) in zip(requests(), ask(policy, both), strict=True):
        expected = asyncio.run(engine.generate(request))
        assert_same(whole, expected)
        assert_same([replace(one, stop=None) for one in streamed], [replace(one, stop=None) for one in expected])
        assert {version for one in whole for version in one.versions} == {5}


def test_refusals_raise_the_errors_of_an_engine(policy: Policy) -> None:
    async def too_long(inference: OpenAIInference) -> None:
        with pytest.raises(PromptTooLong, match="context"):
            await inference.generate(replace(requests()[0], prompt_tokens=[1] * 40))

    async def wrong_token(inference: OpenAIInference) -> None:
        with pytest.raises(ConfigurationError, match="TOKEN_OF_THE_TEST"):
            await inference.generate(requests()[0])

    async def another_model(inference: OpenAIInference) -> None:
        inference._endpoint = replace(ENDPOINT, model="policy")
        with pytest.raises(ConfigurationError, match=r"there is no model 'policy' here: .* use the name"):
            await inference.generate(requests()[0])
        with pytest.raises(ConfigurationError, match="this server has 'tiny'"):
            await anext(inference.stream(requests()[0]))

    ask(policy, too_long)
    ask(policy, another_model)
    ask(policy, wrong_token, token="another")
