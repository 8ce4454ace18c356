"""Answers to reasoning-gym tasks are scored in processes that may hang: some tasks evaluate them as Python."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import cast

import pytest
from optional import needs

from megatron_rl.agent.environments.reasoning_gym import ReasoningGymConfig, ReasoningGymEnvironment
from megatron_rl.agent.scoring import NotJudged
from megatron_rl.agent.scripted_trial import CodePoints

pytestmark = needs("reasoning_gym")

HANGS = "9**9**9**9"
"""Expression that sympy would evaluate for longer than the age of the universe."""


def countdown(timeout_s: float) -> ReasoningGymEnvironment:
    config = ReasoningGymConfig(dataset="countdown", draws=2, held_out=0.0, scorers=1, score_timeout_s=timeout_s)
    return ReasoningGymEnvironment(config, CodePoints())


async def score(environment: ReasoningGymEnvironment, answer: str) -> float:
    [problem, *_] = environment.training_problems()
    return await cast(Awaitable[float], environment.get_reward(answer, problem.golden, "stop"))


def test_answer_that_is_code_is_wrong_and_has_no_effect(tmp_path: Path) -> None:
    environment = countdown(60.0)
    problem = environment.training_problems()[0]
    program = f"__import__('os').system('touch {tmp_path}/run') or open('{tmp_path}/written', 'w')"

    async def rewards() -> list[float]:
        answers = (environment.gold_response(problem), f" {program}\n", "no idea")
        return [await score(environment, answer) for answer in answers]

    right, *wrong = asyncio.run(rewards())
    assert right == 1.0 and max(wrong) < 0.1
    assert [*tmp_path.iterdir()] == []


def test_answer_that_takes_for_ever_to_parse_is_lost() -> None:
    environment = countdown(0.5)
    with pytest.raises(NotJudged, match=r"time-out: no answer within 0.5 s \(environment.args.score_timeout_s\)"):
        asyncio.run(score(environment, HANGS))
