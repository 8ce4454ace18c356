"""Sums and differences of small integers: reasoning-gym's `chain_sum`, small enough for a tiny model to learn.

https://github.com/open-thought/reasoning-gym, `reasoning_gym/arithmetic/chain_sum.py`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import field_validator, model_validator

from megatron_rl.agent.api import Demonstrator
from megatron_rl.agent.datasets import words_key
from megatron_rl.agent.environments.problem_sets import DrawnProblems, DrawnProblemsConfig
from megatron_rl.agent.prompts import template_fields
from megatron_rl.agent.trajectories import Problem
from megatron_rl.generate.engine.interface import FinishReason
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.recipe.section import PositiveInt

TEMPLATE_FIELDS = ("expression", "question", "num_terms", "num_digits")


class ArithmeticConfig(DrawnProblemsConfig):
    """Arguments of the environment `arithmetic`."""

    min_terms: PositiveInt = 2
    """Smallest count of numbers in a problem."""
    max_terms: PositiveInt = 2
    """Largest count of numbers in a problem."""
    min_digits: PositiveInt = 1
    """Smallest number of digits of each number."""
    max_digits: PositiveInt = 1
    """Largest number of digits of each number."""
    template: str = "{expression}="
    """Prompt in Python's format syntax: {expression} without blanks, {question}, {num_terms}, {num_digits}."""

    @field_validator("template")
    @classmethod
    def _asks_the_question(cls, template: str) -> str:
        if not template_fields(template, TEMPLATE_FIELDS) & {"expression", "question"}:
            raise ValueError(
                "the template must contain {expression} or {question}: otherwise the model does not see the problem"
            )
        return template

    @model_validator(mode="after")
    def _ranges_fit(self) -> ArithmeticConfig:
        for unit in ("terms", "digits"):
            low, high = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
            if low > high:
                raise ValueError(f"min_{unit} {low} is larger than max_{unit} {high}")
        return self


class ArithmeticEnvironment(DrawnProblems, Demonstrator):
    """Sums and differences of small integers, for tiny models.

    The answer is the bare integer, as reasoning-gym's chain_sum writes it, followed by the end token.

    The scorer of chain_sum is more lenient (`+3`, `3.0`, `03` are right). Here each prompt has exactly one right
    answer.
    """

    Config = ArithmeticConfig
    compares_answers = True

    @classmethod
    def reward_of_wrong(cls, arguments: ArithmeticConfig) -> float:
        return 0.0

    def __init__(self, config: ArithmeticConfig, tokenizer: Tokenizer) -> None:
        problems = list(_render(_tasks(config), config.template))
        _check_encodable(problems, tokenizer)
        super().__init__(config, tokenizer, problems)

    def demonstrations(self) -> Sequence[tuple[str, str]]:
        return [(problem.prompt, problem.golden["answer"]) for problem in self._trained]

    def get_reward(self, response: str, golden: Mapping[str, Any], finish_reason: FinishReason) -> float:
        return float(finish_reason == "stop" and response == golden["answer"])

    def final_answer(self, response: str) -> str | None:
        return response


def _tasks(config: ArithmeticConfig) -> Any:
    chain_sum = _chain_sum()
    return chain_sum.ChainSumDataset(
        chain_sum.ChainSumConfig(
            min_terms=config.min_terms,
            max_terms=config.max_terms,
            min_digits=config.min_digits,
            max_digits=config.max_digits,
            seed=config.seed,
            size=config.draws,
        )
    )


def _chain_sum() -> Any:
    """Import reasoning_gym.arithmetic.chain_sum on demand: the launcher, which only checks the arguments, does not have
    it.

    Its parent packages import all of their hundred tasks, including matplotlib and sympy, which takes most of a second
    of every start of a rank. So empty packages replace them during the import, and are removed afterwards, so that
    other code can import the real ones.
    """
    name = "reasoning_gym.arithmetic.chain_sum"
    package = None if "reasoning_gym" in sys.modules else importlib.util.find_spec("reasoning_gym")
    if package is None or package.submodule_search_locations is None:
        return importlib.import_module(name)
    for bare, inside in (("reasoning_gym", ""), ("reasoning_gym.arithmetic", "arithmetic")):
        sys.modules[bare] = ModuleType(bare)
        sys.modules[bare].__path__ = [str(Path(place, inside)) for place in package.submodule_search_locations]
    try:
        return importlib.import_module(name)
    finally:
        for module in [module for module in sys.modules if module.partition(".")[0] == "reasoning_gym"]:
            del sys.modules[module]


def _render(tasks: Iterable[Mapping[str, Any]], template: str) -> Iterable[Problem]:
    for task in tasks:
        metadata = task["metadata"]
        prompt = template.format(
            expression=metadata["expression"].replace(" ", ""),
            question=task["question"],
            num_terms=metadata["num_terms"],
            num_digits=metadata["num_digits"],
        )
        yield Problem(prompt, {"answer": task["answer"]}, questions=frozenset({words_key(task["question"])}))


def _check_encodable(problems: Iterable[Problem], tokenizer: Tokenizer) -> None:
    characters = {character for problem in problems for character in problem.prompt + problem.golden["answer"]}
    tokenizer.encode("".join(sorted(characters)))
