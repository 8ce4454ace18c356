"""The environment riddles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.agent.api import Demonstrator
from megatron_rl.agent.reward_only import RewardOnlyAgent
from megatron_rl.agent.trajectories import Problem
from megatron_rl.generate.engine.interface import FinishReason
from megatron_rl.recipe.section import PositiveInt, Section


class RiddlesConfig(Section):
    """Values of `environment.args` in a recipe."""

    largest: PositiveInt = 9
    """Largest summand."""


class Riddles(RewardOnlyAgent, Demonstrator):
    """Sums of two numbers; replace them by your task."""

    Config = RiddlesConfig

    def training_problems(self) -> Sequence[Problem]:
        """Return all problems once, always in the same order."""
        return [problem for index, problem in enumerate(self._problems()) if index % 5]

    def evaluation_problems(self) -> Mapping[str, Sequence[Problem]]:
        """Return sets by name, which are not trained on."""
        return {"held_out": self._problems()[::5]}

    def get_reward(self, response: str, golden: Mapping[str, Any], finish_reason: FinishReason) -> float:
        """Score an answer. `golden` is that of its problem. Use `async def` if scoring waits for something."""
        return float(response.strip() == golden["answer"])

    def demonstrations(self) -> Sequence[tuple[str, str]]:
        """Return prompts and right answers that a tiny model learns first; only for `model.init: supervised`."""
        return [(problem.prompt, problem.golden["answer"]) for problem in self.training_problems()]

    def _problems(self) -> list[Problem]:
        numbers = range(self.config.largest + 1)
        return [Problem(f"{a}+{b}=", {"answer": str(a + b)}) for a in numbers for b in numbers]
