"""Evaluation: answers to the first problems of each set that is due, of which only those with accuracy 1 are right."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from core_helpers import quiet_safe_points, tiny_run, trajectory

from megatron_rl.agent.api import EvaluationAgent, EvaluationRequest, EvaluationResponse
from megatron_rl.agent.trajectories import Problem
from megatron_rl.algorithms.evaluation_scores import average, is_right
from megatron_rl.contract.evaluation_records import SAMPLED, ProblemAnswers, ScoredAnswer
from megatron_rl.contract.shapes import from_json
from megatron_rl.learn.rollout.agent_loop import EngineInTurn
from megatron_rl.learn.rollout.evaluation import evaluate
from megatron_rl.learn.rollout.evaluation_answers import AnswerPlan, answer_problems
from megatron_rl.recipe.environment_section import EnvironmentConfig
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
        count = request.samples_per_problem
        answers = [[] if reward is None else [trajectory([1], [1], reward)] * count for reward in rewards]
        return EvaluationResponse(answers, {"timeout": rewards.count(None) * count})


def score(
    agent: Scripted,
    groups: Any,
    limit: int | None = None,
    release: Callable[[], None] = lambda: None,
    step: int = 0,
    **asked: Any,
) -> dict[str, float]:
    config = tiny_run(sampling={"max_new_tokens": 7}, evaluation={"prompts": limit, **asked})
    engine: Any = SimpleNamespace(busy_s=0.0, release_followers=release, end_phase=lambda: None)
    ranks: Any = SimpleNamespace(index=0, count=1, drives=True)
    loop = EngineInTurn(ranks, engine, quiet_safe_points())
    try:
        return evaluate(agent, engine, config, groups.control, loop, step)
    finally:
        loop.close()


def test_only_a_reward_of_one_is_right(groups: Any) -> None:
    agent = Scripted({"aime": [1.0, 0.5, 0.0, 1.0], "other": [0.99]})
    assert score(agent, groups) == {"eval/aime/greedy_accuracy": 0.5, "eval/other/greedy_accuracy": 0.0}
    assert {request.sampling for request in agent.requests} == {Sampling(temperature=0.0, max_new_tokens=7)}


STYLED = [{"right": 1.0, "style": 0.7}, {"right": 0.0, "style": 1.0}]


class Components(EvaluationAgent):
    """Agent whose rewards have components, those of the problem's golden data."""

    def evaluation_problems(self) -> Mapping[str, Sequence[Problem]]:
        return {}

    async def evaluate(self, request: EvaluationRequest) -> EvaluationResponse:
        (parts,) = (problem.golden for problem in request.problems)
        one = replace(trajectory([1], [1], sum(parts.values())), components=parts)
        return EvaluationResponse([[one] * request.samples_per_problem])


def answered(
    environment: EnvironmentConfig, parts: Sequence[Mapping[str, float]], id: str = ""
) -> list[ProblemAnswers]:
    """Answer problems of the environment, or of its member with this id, each with rewards of these components."""
    problems = {number: Problem("", its, id) for number, its in enumerate(parts)}
    plan = AnswerPlan("held_out", SAMPLED, 1, Sampling(max_new_tokens=7), 0)
    return asyncio.run(answer_problems(Components(), problems, plan, cast(Any, None), environment))


def right(lines: Sequence[ProblemAnswers]) -> list[float | None]:
    """[problems] share of right answers; None without answers."""
    return [score.value if (score := average([line.answers])) else None for line in lines]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [0.0, 1.0]),  # the sum is 1.7 and 1
        ({"accuracy": "right"}, [1.0, 0.0]),
        ({"reward_weights": {"right": 1.0}}, [1.0, 0.0]),
        ({"reward_weights": {"right": 1.0, "style": 0.5}}, [0.0, 0.0]),
        ({"reward_weights": {"right": 1.0, "style": 0.5}, "accuracy": "right"}, [1.0, 0.0]),
    ],
    ids=["sum", "component", "weight", "weights", "component of weights"],
)
def test_an_answer_is_right_by_the_accuracy_that_training_uses(keys: dict[str, Any], expected: list[float]) -> None:
    alone = EnvironmentConfig.model_validate({"name": "python"} | keys)
    several = [{"name": "python", "id": "styled"} | keys, {"name": "python", "id": "other"}]
    combined = EnvironmentConfig(name="multi-task", args={"environments": several})
    assert right(answered(alone, STYLED)) == right(answered(combined, STYLED, "styled")) == expected
    assert right(answered(combined, STYLED, "other")) == [0.0, 1.0]


def test_an_answer_without_the_component_that_says_how_right_it_is_is_lost_and_counted() -> None:
    environment = EnvironmentConfig(name="python", reward_weights={"style": 1.0}, accuracy="right")
    scored, lost = answered(environment, [{"right": 1.0}, {"style": 1.0}])
    assert (right([scored, lost]), scored.failures) == ([1.0, None], {}), "nothing reads `style` here"
    assert lost.failures == {"the reward has no component right (environment.reward_weights, accuracy)": 1}


def test_answers_that_an_earlier_version_has_recorded_are_right_by_their_reward() -> None:
    recorded = {"reward": 1.0, "tokens": 3, "finish_reason": "stop", "text": ""}
    assert is_right(from_json(ScoredAnswer, recorded)) and not is_right(
        from_json(ScoredAnswer, recorded | {"reward": 2.0})
    )


@pytest.mark.parametrize(("limit", "accuracy"), [(2, 1.0), (3, 2 / 3), (99, 0.5)])
def test_a_limit_selects_the_first_problems(groups: Any, limit: int, accuracy: float) -> None:
    agent = Scripted({"aime": [1.0, 1.0, 0.0, 0.0]})
    assert score(agent, groups, limit) == {"eval/aime/greedy_accuracy": pytest.approx(accuracy)}
    assert len(agent.requests) == min(limit, 4)


def test_lost_answers_are_counted_apart_from_wrong_ones(groups: Any, caplog: pytest.LogCaptureFixture) -> None:
    agent = Scripted({"aime": [1.0, None, 0.0, None], "lost": [None], "empty": []})
    assert score(agent, groups) == {
        "eval/aime/greedy_accuracy": 0.5,
        "eval/aime/failed_rollouts": 2,
        "eval/lost/failed_rollouts": 1,
    }
    messages = [record.message for record in caplog.records]
    assert messages == ["evaluation on aime: 2 answers lost: timeout", "evaluation on lost: 1 answers lost: timeout"]


def test_sampled_answers_have_their_own_settings_and_scores_with_intervals(groups: Any) -> None:
    agent = Scripted({"aime": [1.0, 0.5], "other": [1.0]})
    sets = {"other": {"samples": 0, "max_new_tokens": 3}}
    found = score(agent, groups, samples=4, pass_at=[1, 4], temperature=0.6, sets=sets)
    low, high = found["eval/aime/pass@1_low"], found["eval/aime/pass@1_high"]
    assert 0 < low < 0.5 < high < 1
    assert {name: value for name, value in found.items() if not name.endswith(("_low", "_high"))} == {
        "eval/aime/greedy_accuracy": 0.5,
        **{f"eval/aime/{name}": 0.5 for name in ("pass@1", "pass@4", "avg@4")},
        "eval/aime/mean_reward": 0.75,
        "eval/aime/tokens": 1.0,
        "eval/aime/cut_off": 0.0,
        "eval/other/greedy_accuracy": 1.0,
    }
    asked = [(one.samples_per_problem, one.sampling.temperature, one.sampling.max_new_tokens) for one in agent.requests]
    assert asked == [(1, 0.0, 7), (1, 0.0, 7), (4, 0.6, 7), (4, 0.6, 7), (1, 0.0, 3)]
    assert len({one.key for one in agent.requests}) == 5, "no two share random numbers"


def test_each_set_is_evaluated_at_its_own_steps(groups: Any) -> None:
    asked: dict[str, Any] = {"every": 2, "sets": {"rare": {"every": 3}, "ends": {"every": 0}}}
    agent = Scripted({"often": [1.0], "rare": [1.0], "ends": [1.0]})
    found = {step: {*score(agent, groups, step=step, **asked)} for step in (0, 1, 2, 3, 6)}
    names = {name: f"eval/{name}/greedy_accuracy" for name in agent.sets}
    everything = {*names.values()}
    assert found == {0: everything, 1: set(), 2: {names["often"]}, 3: {names["rare"]}, 6: everything - {names["ends"]}}


def test_error_of_an_agent_is_raised_without_another_collective(groups: Any) -> None:
    """The other ranks of its engine would not take part, and the error would be reported after their time-out."""

    class Broken(Scripted):
        async def evaluate(self, request: EvaluationRequest) -> EvaluationResponse:
            raise RuntimeError("no such tool")

    released: list[None] = []
    with pytest.raises(RuntimeError, match="no such tool"):
        score(Broken({"aime": [1.0]}), groups, release=lambda: released.append(None))
    assert len(released) == 1, "once, after the agents ran"
