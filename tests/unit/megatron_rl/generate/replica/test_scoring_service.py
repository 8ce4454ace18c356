"""The one route of a replica that holds the teacher."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
import torch
from core_helpers import CPU, END, full_forward, tiny_model, tiny_policy

from megatron_rl.contract.attempt_records import ReplicaAddress
from megatron_rl.contract.paths import TEACHER, RunDir
from megatron_rl.generate.engine.engine import Engine
from megatron_rl.generate.engine.openai import scores, scoring_body
from megatron_rl.generate.replica.leader import Leader, LedEngineThread
from megatron_rl.generate.replica.scoring_service import ScoringService
from megatron_rl.rank.activity import Activity
from megatron_rl.recipe.inference import InferenceConfig

TOKEN = "0123456789abcdef" * 2
LONGEST = 48


def asked(engine: Engine, *prompts: list[int], token: str = TOKEN) -> list[httpx.Response]:
    """Responses to concurrent requests."""

    async def run() -> list[httpx.Response]:
        replica = RunDir("/nonexistent").attempt(1).replica(0, TEACHER)
        scorer = LedEngineThread(Leader(engine, None, None, Activity(replica, published=False)))
        service = ScoringService(scorer, replica, ReplicaAddress(0, 0, "", 0, 1, "", 1, 0.0), TOKEN)
        headers = {"Authorization": f"Bearer {token}"}
        transport = httpx.ASGITransport(service.app)
        async with (
            scorer.running(),
            httpx.AsyncClient(transport=transport, base_url="http://t", headers=headers) as http,
        ):
            bodies = [scoring_body(prompt, "teacher", 0) for prompt in prompts]
            return await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))

    return asyncio.run(run())


@pytest.fixture
def engine(platform: Any, groups: Any) -> Engine:
    model = tiny_model(max_position_embeddings=LONGEST)
    return Engine(tiny_policy(platform, model), model, InferenceConfig(max_batch=2), {END}, LONGEST + 1)


def test_log_probs_are_those_of_a_full_forward_up_to_the_last_position(engine: Engine) -> None:
    prompts = [[1, 2, 3], [4, 5, 6, 7, END, 8], [n % END for n in range(LONGEST)], [9, 9]]
    for prompt, answer in zip(prompts, asked(engine, *prompts), strict=True):
        logprobs = torch.log_softmax(full_forward(engine.policy, prompt)[:-1].float(), -1)
        expected = logprobs.gather(1, torch.tensor(prompt[1:], device=CPU)[:, None])[:, 0]
        found = [each.logprob for each in scores(answer.json(), prompt, 0)]
        assert found == pytest.approx(expected.tolist(), abs=1e-5)


def test_what_cannot_be_scored_is_refused_and_so_is_another_token(engine: Engine) -> None:
    unknown, too_long = asked(engine, [1, 10_000], [1] * (LONGEST + 1))
    assert (unknown.status_code, too_long.status_code) == (400, 400)
    assert "10000" in unknown.json()["error"]["message"]
    (stranger,) = asked(engine, [1, 2], token="f" * 32)
    assert stranger.status_code == 401
