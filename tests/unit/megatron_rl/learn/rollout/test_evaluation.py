"""Evaluation: greedy answers to the first problems of each set, of which only rewards of exactly 1 are right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from core_helpers import quiet_safe_points, tiny_run, trajectory

from megatron_rl.agent.api import EvaluationAgent, EvaluationRequest, EvaluationResponse
from megatron_rl.agent.trajectories import Problem
from megatron_rl.learn.rollout.agent_loop import EngineInTurn
from megatron_rl.learn.rollout.evaluation import evaluate
from megatron_rl.recipe.inference import Sampling


class Scripted(EvaluationAgent):
    """Agent whose rewards are the problems' golden answers. None: the answer is lost."""

    def __init__(self, sets: Mapping[str, Sequence[float | None]]) -> None:
        self.sets = {name: [Problem("", {"reward": reward}) for reward in rewards] for name, rewards in sets.items()}
        self.requests: list[EvaluationRequest] = []

    def evaluation_problems(self) -> Mapping[str, Sequence[Problem]]:
        return self.sets

    async def evaluate(self, request: EvaluationRequest) -> EvaluationResponse:
        self.requests.append(request)
        rewards = [problem.golden["reward"] for problem in request.problems]
        answers = [[] if reward is None else [trajectory([1], [1], reward)] for reward in rewards]
        return EvaluationResponse(answers, {"timeout": rewards.count(None)})


def score(
    agent: Scripted, groups: Any, limit: int | None = None, release: Callable[[], None] = lambda: None
) -> dict[str, float]:
    config = tiny_run(sampling={"max_new_tokens": 7}, evaluation={"prompts": limit})
    engine: Any = SimpleNamespace(busy_s=0.0, release_followers=release, end_phase=lambda: None)
    ranks: Any = SimpleNamespace(index=0, count=1, drives=True)
    loop = EngineInTurn(ranks, engine, quiet_safe_points())
    try:
        return evaluate(agent, engine, config, groups, loop)
    finally:
        loop.close()


def test_only_a_reward_of_one_is_right(groups: Any) -> None:
    agent = Scripted({"aime": [1.0, 0.5, 0.0, 1.0], "other": [0.99]})
    assert score(agent, groups) == {"eval/aime/greedy_accuracy": 0.5, "eval/other/greedy_accuracy": 0.0}
    assert {request.sampling for request in agent.requests} == {Sampling(temperature=0.0, max_new_tokens=7)}


@pytest.mark.parametrize(("limit", "accuracy"), [(2, 1.0), (3, 2 / 3), (99, 0.5)])
def test_a_limit_selects_the_first_problems(groups: Any, limit: int, accuracy: float) -> None:
    agent = Scripted({"aime": [1.0, 1.0, 0.0, 0.0]})
    assert score(agent, groups, limit) == {"eval/aime/greedy_accuracy": pytest.approx(accuracy)}
    assert len(agent.requests[0].problems) == min(limit, 4)


def test_lost_answers_are_counted_apart_from_wrong_ones(groups: Any, caplog: pytest.LogCaptureFixture) -> None:
    agent = Scripted({"aime": [1.0, None, 0.0, None], "lost": [None], "empty": []})
    assert score(agent, groups) == {
        "eval/aime/greedy_accuracy": 0.5,
        "eval/aime/failed_rollouts": 2,
        "eval/lost/failed_rollouts": 1,
    }
    messages = [record.message for record in caplog.records]
    assert messages == ["evaluation on aime: 2 answers lost: timeout", "evaluation on lost: 1 answers lost: timeout"]


def test_error_of_an_agent_is_raised_without_another_collective(groups: Any) -> None:
    """The other ranks of its engine would not take part, and the error would be reported after their time-out."""

    class Broken(Scripted):
        async def evaluate(self, request: EvaluationRequest) -> EvaluationResponse:
            raise RuntimeError("no such tool")

    released: list[None] = []
    with pytest.raises(RuntimeError, match="no such tool"):
        score(Broken({"aime": [1.0]}), groups, release=lambda: released.append(None))
    assert len(released) == 1, "once, after the agents ran"
