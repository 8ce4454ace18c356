"""Programs in a real run: an engine with weights, a bank, and a drain in the middle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from bank_helpers import bank_in, collect
from core_helpers import build_run, tiny_run

from megatron_rl.agent.endpoint.agent import EndpointAgent, RunResult
from megatron_rl.agent.endpoint.session import RolloutSession
from megatron_rl.agent.reward_value import TurnScore
from megatron_rl.agent.scoring import RolloutLimits
from megatron_rl.agent.trajectories import Problem, TrajectoryGroup
from megatron_rl.recipe.chat_section import EndpointConfig
from megatron_rl.recipe.rollout import ResumeConfig
from megatron_rl.run.state import Run


class TwoCalls(EndpointAgent):
    """Programs that ask a problem of the run, and then something behind the answer."""

    Config = EndpointConfig

    def __init__(self, run: Run, second: str = "+") -> None:
        super().__init__(EndpointConfig(), run.environment.tokenizer)
        self._problems, self._second = run.environment.training_problems(), second
        self.begun = 0

    def training_problems(self) -> Sequence[Problem]:
        return self._problems

    def evaluation_problems(self) -> Mapping[str, Sequence[Problem]]:
        return {}

    async def run(self, problem: Problem, session: RolloutSession, limits: RolloutLimits) -> RunResult:
        self.begun += 1
        async with httpx.AsyncClient(base_url=session.base_url, timeout=60, trust_env=False, verify=False) as client:
            text = await self._answer(client, problem.prompt)
            more = await self._answer(client, problem.prompt + text + self._second)
            turns = [{"reward": len(text), "key": text[:1]}, {"reward": len(more), "key": more[:1]}]
            return RunResult({"turn_rewards": turns})

    async def _answer(self, client: httpx.AsyncClient, prompt: str) -> str:
        response = await client.post("completions", json={"prompt": prompt})
        text: str = response.raise_for_status().json()["choices"][0]["text"]
        return text


@pytest.fixture(scope="module")
def run(platform: Any, groups: Any) -> Run:
    config = tiny_run(
        sampling={"max_new_tokens": 6}, inference={"max_batch": 6}, grpo={"prompts_per_step": 2, "group_size": 3}
    )
    return build_run(config, platform, groups, scale=0.15)


def sequences(groups: Sequence[TrajectoryGroup]) -> list[list[tuple[list[int], list[bool]]]]:
    return [[(one.tokens, one.loss_mask) for each in group.trajectories for one in each.sequences] for group in groups]


def turns(groups: Sequence[TrajectoryGroup]) -> list[list[tuple[TurnScore, ...]]]:
    return [[each.turn_scores for each in group.trajectories] for group in groups]


def test_rollouts_that_a_drain_interrupts_are_begun_again_and_end_alike(run: Run, tmp_path: Path) -> None:
    undisturbed = collect(run, agent=TwoCalls(run))
    assert [len(group.trajectories) for group in undisturbed] == [3, 3]
    keep = ResumeConfig(partial="keep")
    assert collect(run, bank_in(tmp_path, 1, keep), stop_after=9, agent=TwoCalls(run)) == []
    again = TwoCalls(run)
    resumed = collect(run, bank_in(tmp_path, 2, keep), agent=again)
    assert sequences(resumed) == sequences(undisturbed)
    assert turns(resumed) == turns(undisturbed) and all(len(its) == 2 for group in turns(resumed) for its in group)
    assert 0 < again.begun <= 6


def test_answers_to_other_prompts_are_not_those_of_the_interrupted_attempt(run: Run, tmp_path: Path) -> None:
    """A program that is begun again may ask something else, for example because it draws random numbers."""
    keep = ResumeConfig(partial="keep")
    assert collect(run, bank_in(tmp_path, 1, keep), stop_after=9, agent=TwoCalls(run, "+")) == []
    resumed = collect(run, bank_in(tmp_path, 2, keep), agent=TwoCalls(run, "0"))
    assert sequences(resumed) == sequences(collect(run, agent=TwoCalls(run, "0")))
