"""Sums and differences of small integers: reasoning-gym's `chain_sum`, small enough for a tiny model to learn.

https://github.com/open-thought/reasoning-gym, `reasoning_gym/arithmetic/chain_sum.py`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Formatter
from types import ModuleType
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from megatron_rl.agent.api import Demonstrator
from megatron_rl.agent.keys import stable_key
from megatron_rl.agent.reward_only import RewardOnlyAgent
from megatron_rl.agent.trajectories import Problem
from megatron_rl.inference.api import FinishReason
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.section import NonNegativeInt, PositiveInt, Section

TEMPLATE_FIELDS = ("expression", "question", "num_terms", "num_digits")


class ArithmeticConfig(Section):
    """Arguments of the environment `arithmetic`."""

    min_terms: PositiveInt = 2
    max_terms: PositiveInt = 2
    min_digits: PositiveInt = 1
    max_digits: PositiveInt = 1
    draws: PositiveInt = 4000
    """Tasks drawn from reasoning-gym; those that render to the same prompt count once. Of two terms with one digit
    there are 200, and 4000 draws find them all."""
    seed: NonNegativeInt = 0
    """Seed of the draws and of the split into trained and held-out problems; independent of `training.seed`."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Fraction of the problems that is never trained on."""
    evaluation_problems: PositiveInt = 256
    """Problems of each evaluation set at most."""
    template: str = "{expression}="
    """The prompt, in Python's format syntax: {expression} without blanks, {question}, {num_terms}, {num_digits}."""

    @field_validator("template")
    @classmethod
    def _asks_the_question(cls, template: str) -> str:
        fields = {field for _, field, _, _ in Formatter().parse(template) if field is not None}
        unknown = sorted(fields - set(TEMPLATE_FIELDS))
        if unknown:
            raise ValueError(f"unknown field {{{unknown[0]}}}; there are {', '.join(TEMPLATE_FIELDS)}")
        if not fields & {"expression", "question"}:
            raise ValueError("the template must contain {expression} or {question}: nothing else says what to compute")
        return template

    @model_validator(mode="after")
    def _ranges_fit(self) -> ArithmeticConfig:
        for unit in ("terms", "digits"):
            low, high = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
            if low > high:
                raise ValueError(f"min_{unit} {low} is larger than max_{unit} {high}")
        return self


class ArithmeticEnvironment(RewardOnlyAgent, Demonstrator):
    """The answer is the bare integer, as `reasoning-gym` writes it, and ends there.

    Its verifier is more lenient (`+3`, `3.0`, `03` are right): every answer rewarded here is right there, not the
    other way round, so that one prompt has one right answer.
    """

    Config = ArithmeticConfig

    def __init__(self, config: ArithmeticConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        problems = _in_split_order(_distinct_problems(config), config.seed)
        held_out = round(config.held_out * len(problems))
        self._held_out = problems[:held_out]
        self._trained = problems[held_out:]
        _check_encodable(problems, tokenizer)

    def training_problems(self) -> Sequence[Problem]:
        return self._trained

    def evaluation_problems(self) -> Mapping[str, Sequence[Problem]]:
        """`held_out` is missing where nothing is held out."""
        limit = self.config.evaluation_problems
        sets = {"trained": self._trained[:limit], "held_out": self._held_out[:limit]}
        return {name: problems for name, problems in sets.items() if problems}

    def demonstrations(self) -> Sequence[tuple[str, str]]:
        return [(problem.prompt, problem.golden["answer"]) for problem in self._trained]

    def get_reward(self, response: str, golden: Mapping[str, Any], finish_reason: FinishReason) -> float:
        return float(finish_reason == "stop" and response == golden["answer"])


def _distinct_problems(config: ArithmeticConfig) -> list[Problem]:
    chain_sum = _chain_sum()
    tasks = chain_sum.ChainSumDataset(
        chain_sum.ChainSumConfig(
            min_terms=config.min_terms,
            max_terms=config.max_terms,
            min_digits=config.min_digits,
            max_digits=config.max_digits,
            seed=config.seed,
            size=config.draws,
        )
    )
    return list({problem.prompt: problem for problem in _render(tasks, config.template)}.values())


def _chain_sum() -> Any:
    """reasoning_gym.arithmetic.chain_sum, imported when it is needed: the launcher, which only checks the arguments,
    lacks the package.

    The packages around it import all their hundred tasks, matplotlib and sympy with them, most of a second of every
    start of a rank. So bare ones take their place meanwhile, and leave again: who wants all of them can have them.
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
        yield Problem(prompt, {"answer": task["answer"]})


def _in_split_order(problems: Iterable[Problem], seed: int) -> list[Problem]:
    """Shuffled by a hash of the prompt, so that neither the order of the draws nor their number moves a problem
    that all draws find from one side of the split to the other."""
    return sorted(problems, key=lambda problem: (stable_key(f"split:{problem.prompt}", seed), problem.prompt))


def _check_encodable(problems: Iterable[Problem], tokenizer: Tokenizer) -> None:
    characters = {character for problem in problems for character in problem.prompt + problem.golden["answer"]}
    tokenizer.encode("".join(sorted(characters)))
