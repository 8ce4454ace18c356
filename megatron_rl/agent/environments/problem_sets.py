"""Generated problems: drawn without repeats, and split permanently into training and held-out problems."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

from pydantic import Field

from megatron_rl.agent.data_rows import limited
from megatron_rl.agent.keys import stable_key
from megatron_rl.agent.reward_only import RewardOnlyAgent
from megatron_rl.agent.trajectories import Problem
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.recipe.section import NonNegativeInt, PositiveInt, Section


class DrawnProblemsConfig(Section):
    """Arguments of every environment with generated problems."""

    draws: PositiveInt = 4000
    """Number of tasks to draw; tasks with equal prompts count once. For example, there are 200 sums of two one-digit
    numbers, and 4000 draws find all of them."""
    seed: NonNegativeInt = 0
    """Seed of the draws and of the split; independent of `training.seed`."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Fraction of the problems that is never trained on."""
    evaluation_problems: PositiveInt = 256
    """Largest number of problems of each evaluation set."""


class DrawnProblems(RewardOnlyAgent):
    config: DrawnProblemsConfig

    def __init__(self, config: DrawnProblemsConfig, tokenizer: Tokenizer, drawn: Iterable[Problem]) -> None:
        super().__init__(config, tokenizer)
        problems = _in_split_order({problem.prompt: problem for problem in limited(drawn)}.values(), config.seed)
        held_out = round(config.held_out * len(problems))
        self._held_out = problems[:held_out]
        self._trained = problems[held_out:]

    def training_problems(self) -> Sequence[Problem]:
        return self._trained

    def evaluation_problems(self) -> Mapping[str, Sequence[Problem]]:
        """Return the sets `trained` and `held_out`, without empty ones."""
        limit = self.config.evaluation_problems
        sets = {"trained": self._trained[:limit], "held_out": self._held_out[:limit]}
        return {name: problems for name, problems in sets.items() if problems}


def _in_split_order(problems: Iterable[Problem], seed: int) -> list[Problem]:
    """Shuffle by a hash of the prompt, so that neither the order nor the number of draws moves a problem from one side
    of the split to the other."""
    return sorted(problems, key=lambda problem: (stable_key(f"split:{problem.prompt}", seed), problem.prompt))
