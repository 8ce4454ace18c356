"""Answers of the real vLLM in a form that a program forces: training computes the same log-probs, over the tokens that
the form allows."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import Ranks
from hf_helpers import publish
from layout_helpers import Layout
from optional import needs
from server_helpers import byte_tokenizer
from vllm_front import Front
from vllm_training import CLOSE, PROMPT, SERVED, Trainer, prepare_run, probe_of

from megatron_rl.agent.trajectories import Trajectory
from megatron_rl.algorithms.allowed_tokens import allowed_tokens
from megatron_rl.algorithms.logprobs import token_logprobs
from megatron_rl.contract.paths import RunDir
from megatron_rl.generate.engine.interface import Completion, GenerationRequest
from megatron_rl.model.chat.answer_form import AnswerForm, grammar_of
from megatron_rl.model.chat.chat import Chat
from megatron_rl.model.grammar import Grammars
from megatron_rl.recipe.inference import Sampling

pytestmark = needs("llguidance")

LIMIT_S = 600.0
SIZE = {
    "type": "object",
    "properties": {
        "word": {"type": "string", "maxLength": 6},
        "count": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["word", "count"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "order", "parameters": SIZE}},
    {
        "type": "function",
        "function": {"name": "leave", "parameters": {"type": "object", "additionalProperties": False}},
    },
]
FORMS = (AnswerForm(SIZE), AnswerForm(tools=TOOLS), AnswerForm(SIZE, TOOLS[1:]))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    publish(folder, SERVED["Qwen2"] | {"vocab_size": 272, "max_position_embeddings": 256})
    byte_tokenizer().save(folder)
    return folder


def ask_in_forms(_rank: int, _world: int, run: RunDir, published: Path, temperature: float) -> list[dict[str, Any]]:
    """Ask for answers in each form. Return them with the log-probs of training."""
    from core_helpers import full_forward

    trainer = Trainer(run, Layout())
    trainer.load(published)
    whole = trainer.whole(published)
    trainer.publish(1, probe_of(whole))
    chat, grammars, pool = Chat(trainer.tokenizer), Grammars(trainer.tokenizer), trainer.pool
    assert pool is not None
    sampling = Sampling(max_new_tokens=100, temperature=temperature)
    requests = [
        GenerationRequest(PROMPT, 4, sampling, key, grammar=grammar_of(form, chat, PROMPT))
        for key, form in enumerate(FORMS)
    ]
    requests += [
        GenerationRequest(PROMPT, 1, sampling.model_copy(update={"max_new_tokens": 5}), 7, grammar=requests[0].grammar)
    ]
    requests += [GenerationRequest(PROMPT, 2, sampling.model_copy(update={"max_new_tokens": 5}), 8)]

    async def all_of_them() -> list[list[Completion]]:
        return await asyncio.gather(*(pool.generate(request) for request in requests))

    found = []
    for number, answers in enumerate(asyncio.run(all_of_them())):
        for one in answers:
            trajectory = Trajectory.single(PROMPT, one, "", 0.0)
            allowed = allowed_tokens([trajectory], grammars, torch.device("cpu"))
            assert (allowed is None) == (number == len(requests) - 1)
            with torch.no_grad():
                logits = full_forward(whole, trajectory.tokens)[len(PROMPT) - 1 : -1]
            expected, _ = token_logprobs(logits, torch.tensor(one.tokens), temperature, allowed=allowed)
            plain, _ = token_logprobs(logits, torch.tensor(one.tokens), temperature)
            parsed = chat.parse(one.tokens, PROMPT, TOOLS)
            found.append(
                {
                    "form": number,
                    "content": parsed.content,
                    "calls": [(call.name, call.arguments) for call in parsed.tool_calls],
                    "logprobs": one.logprobs,
                    "expected": expected.tolist(),
                    "plain": plain.tolist(),
                    "reason": one.finish_reason,
                }
            )
    trainer.refit.close()
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_on_policy_the_ratio_of_forced_answers_is_one(published: Path, tmp_path: Path, temperature: float) -> None:
    sections = {
        "inference": {"engine": "vllm", "max_batch": 16, "vllm": {"forms": True}},
        "training": {"steps": 4, "sequence_length": 256},
        "sampling": {"max_new_tokens": 100, "temperature": temperature},
    }
    run = prepare_run(tmp_path / "run", published, **sections)
    with Front(run) as front:
        front.wait_until_it_answers()
        found = Ranks(tmp_path, 1, ask_in_forms, run, published, temperature).results(LIMIT_S)[0]
        assert front.process.is_running(), front.text()
    for each in found:
        assert each["logprobs"] == pytest.approx(each["expected"], abs=CLOSE)
    forced = [each for each in found if each["form"] < 3]
    assert any(
        abs(one - other) > 1 for each in forced for one, other in zip(each["logprobs"], each["plain"], strict=True)
    )
    for each in forced:
        if each["form"] == 0 or not each["calls"]:
            assert [*json.loads(each["content"])] == ["word", "count"] and each["form"] != 1
        else:
            ((name, arguments),) = each["calls"]
            assert [*json.loads(arguments)] == (["word", "count"] if name == "order" else [])
        assert each["reason"] == "stop"
    assert [each["reason"] for each in found if each["form"] == 3] == ["length"]
