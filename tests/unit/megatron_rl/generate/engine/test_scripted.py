"""The scripted engine gives the given answers, and ends them as any engine does."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from megatron_rl.generate.engine.interface import (
    AnswerPrefix,
    Completion,
    GenerationRequest,
    PromptTooLong,
    Unsupported,
)
from megatron_rl.generate.engine.scripted import LOGPROB, ScriptedInference
from megatron_rl.model.tokenizer import CharacterTokenizer
from megatron_rl.recipe.inference import Sampling

TOKENIZER = CharacterTokenizer("0123456789+-=")
END = TOKENIZER.eos_id


def ask(prompt: str = "1+1=", samples: int = 1, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(TOKENIZER.encode(prompt), samples, Sampling(**({"max_new_tokens": 9} | sampling)), key=0)


def answer(engine: ScriptedInference, request: GenerationRequest) -> list[Completion]:
    found = asyncio.run(engine.generate(request))
    assert engine.unanswered == 0
    return found


def test_sample_i_gets_answer_i_and_requests_are_recorded() -> None:
    engine = ScriptedInference(TOKENIZER, ["2", "33"])
    engine.policy_version = 7
    request = ask(samples=3)
    two, three, again = answer(engine, request)
    assert (two.tokens, two.finish_reason) == ([2, END], "stop")
    assert (three.tokens, three.logprobs, three.versions) == ([3, 3, END], [LOGPROB] * 3, [7] * 3)
    assert again == two
    assert engine.requests == [request]


def test_limits_stop_strings_and_stop_tokens_end_an_answer() -> None:
    engine = ScriptedInference(TOKENIZER, ["123456"])
    (cut,) = answer(engine, ask(max_new_tokens=4))
    assert (cut.tokens, cut.finish_reason) == ([1, 2, 3, 4], "length")
    (stopped,) = answer(engine, ask(stop=("34",)))
    assert (stopped.tokens, stopped.finish_reason, stopped.stop) == ([1, 2, 3, 4], "stop", "34")
    (ended,) = answer(engine, ask(stop_tokens=(5,)))
    assert (ended.tokens, ended.finish_reason, ended.stop) == ([1, 2, 3, 4, 5], "stop", None)
    known = {0: AnswerPrefix([1, 2], [-2.0, -3.0], [4, 4])}
    (resumed,) = answer(engine, replace(ask(stop=("34",)), known=known))
    assert (resumed.tokens, resumed.versions, resumed.logprobs[:3]) == (
        [1, 2, 3, 4],
        [4, 4, 0, 0],
        [-2.0, -3.0, LOGPROB],
    )


def test_unsupported_parameters_are_refused_by_name() -> None:
    engine = ScriptedInference(TOKENIZER, ["1"], max_length=12)
    for wrong, error, message in (
        (replace(ask(), top_logprobs=2), Unsupported, "top_logprobs"),
        (ask(min_new_tokens=2), Unsupported, "min_new_tokens"),
        (ask("1+1+1="), PromptTooLong, "12"),
    ):
        with pytest.raises(error, match=message):
            answer(engine, wrong)


def test_cancelled_request_no_longer_counts_as_being_answered() -> None:
    async def leave() -> int:
        engine = ScriptedInference(TOKENIZER, ["123456"])
        task = asyncio.ensure_future(engine.generate(ask()))
        await asyncio.sleep(0)
        assert engine.unanswered == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return engine.unanswered

    assert asyncio.run(leave()) == 0
