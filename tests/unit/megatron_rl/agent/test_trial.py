"""Trial of an environment without a model: the rewards of a right and of a wrong answer, or why there are none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from megatron_rl.agent.api import Environment
from megatron_rl.agent.reward_only import RewardOnlyAgent
from megatron_rl.agent.scripted_trial import CodePoints, first_problems, try_answers
from megatron_rl.agent.trajectories import Problem
from megatron_rl.generate.engine.interface import FinishReason
from megatron_rl.recipe.environment_section import EnvironmentConfig
from megatron_rl.recipe.registry import describe_environments
from megatron_rl.recipe.section import Section


class Riddles(RewardOnlyAgent):
    """Riddles, each with one answer. More on them elsewhere."""

    class Config(Section):
        problems: int = 4

    golden: Mapping[str, Any] = {"answer": "an egg"}

    def training_problems(self) -> Sequence[Problem]:
        return [Problem(f"What is {number}?", self.golden) for number in range(self.config.problems)]

    def evaluation_problems(self) -> Mapping[str, Sequence[Problem]]:
        return {}

    def get_reward(self, response: str, golden: Mapping[str, Any], finish_reason: FinishReason) -> float:
        return float(response == golden["answer"] and finish_reason == "stop")


def try_it(cls: type[Environment], **arguments: Any) -> list[dict[str, Any]]:
    config = EnvironmentConfig(name="riddles", args=arguments)
    environment = cls(cls.Config(**arguments), CodePoints())
    return [*try_answers(environment, config, first_problems(environment, config, 2))]


def test_first_problems_have_rewards_of_a_right_and_a_wrong_answer() -> None:
    rewards = {"gold": "an egg", "gold_reward": 1.0, "wrong": "I do not know.", "wrong_reward": 0.0}
    assert try_it(Riddles) == [{"prompt": f"What is {number}?", **rewards} for number in range(2)]
    assert len(try_it(Riddles, problems=1)) == 1


def test_answer_that_cannot_be_scored_has_no_reward_but_a_reason() -> None:
    class Broken(Riddles):
        def get_reward(self, response: str, golden: Mapping[str, Any], finish_reason: FinishReason) -> float:
            return super().get_reward(response, golden, finish_reason) or 1 / 0

    one = try_it(Broken)[0]
    assert (one["gold_reward"], one["wrong_reward"]) == (1.0, None)
    line = Broken.get_reward.__code__.co_firstlineno + 1
    assert one["failures"] == [f"get_reward at test_trial.py:{line}: ZeroDivisionError: division by zero"]


def test_missing_problems_or_right_answers_are_reported() -> None:
    class Open(Riddles):
        golden = {"hint": "round"}

        def get_reward(self, response: str, golden: Mapping[str, Any], finish_reason: FinishReason) -> float:
            return 0.0

    with pytest.raises(ValueError, match="'riddles' has no problems"):
        try_it(Riddles, problems=0)
    one = try_it(Open)[0]
    assert (one["gold_reward"], one["no_gold"], one["wrong_reward"]) == (None, "Open has no gold_response", 0.0)
    assert "failures" not in one


def test_all_installed_environments_are_described() -> None:
    found = {one.name: one for one in describe_environments()}
    assert {"aime-2024", "big-math", "countdown", "dapo-math-17k", "gsm8k", "math", "open-math-instruct-2"} <= {*found}
    assert "reasoning-gym/chain_sum" in found and len([name for name in found if "reasoning-gym/" in name]) > 90
    assert all(one.description and one.source.startswith("mrl ") for one in found.values())
    assert [*found] == sorted(found)
