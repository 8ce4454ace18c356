"""Countdown: reach a target with the four operations and each of some numbers once.

Problems are generated, or read from a data set such as Jiayi-Pan/Countdown-Tasks-3to4, whose rows have a list of
numbers and a target. The model's expression is parsed, never evaluated as a program (agent/environments/expression.py).
"""

from __future__ import annotations

import json
import operator
import random
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from pydantic import Field, model_validator

from megatron_rl.agent.answer_format import FORMATS
from megatron_rl.agent.datasets import DataSet, data_extras, hub_names, read_questions, words_key
from megatron_rl.agent.environments.expression import BadExpression, evaluate
from megatron_rl.agent.environments.problem_sets import DrawnProblems, DrawnProblemsConfig
from megatron_rl.agent.keys import stable_key
from megatron_rl.agent.prompts import PromptConfig, prompt_format, render_prompt
from megatron_rl.agent.trajectories import Problem
from megatron_rl.generate.engine.interface import FinishReason
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.recipe.section import PositiveInt

PROMPT = (
    "Using each of the numbers {numbers} exactly once, write an expression that equals {target}. You may use +, -, *, "
    "/ and parentheses. Reason step by step and give the expression, without an equals sign, as "
    "<answer>...</answer>, for example <answer>(1 + 2) / 3</answer>."
)
TAGS = FORMATS["tags"]
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


class CountdownRows(DataSet):
    """Data set of problems, and the columns of numbers and target."""

    structured = True

    question: str = "nums"
    """Column of the numbers: a list of whole numbers."""
    answer: str = "target"
    """Column of the target."""


class CountdownConfig(DrawnProblemsConfig, PromptConfig):
    """Arguments of the environment `countdown`."""

    train: CountdownRows | None = None
    """Data set to read problems from; default: generate them."""
    min_numbers: PositiveInt = Field(default=3, ge=2)
    """Smallest count of numbers of a generated problem."""
    max_numbers: PositiveInt = Field(default=4, le=8)
    """Largest count of numbers of a generated problem."""
    largest: PositiveInt = 99
    """Largest number of a generated problem, and largest target."""
    format_reward: float = 0.0
    """Reward of a tagged expression that is invalid, uses other numbers, or has another value."""

    @model_validator(mode="after")
    def _range_fits(self) -> CountdownConfig:
        if self.min_numbers > self.max_numbers:
            raise ValueError(f"min_numbers {self.min_numbers} is larger than max_numbers {self.max_numbers}")
        return self

    def datasets(self) -> list[str]:
        return hub_names([self.train])

    def extras(self) -> list[str]:
        return data_extras([self.train])


class Countdown(DrawnProblems):
    """Countdown: reach a target with the four operations and each of some numbers once."""

    Config = CountdownConfig
    config: CountdownConfig

    @classmethod
    def reward_of_wrong(cls, arguments: CountdownConfig) -> float:
        return max(0.0, arguments.format_reward)

    def __init__(self, config: CountdownConfig, tokenizer: Tokenizer) -> None:
        found = _of_rows(config.train) if config.train else _drawn(config)
        super().__init__(config, tokenizer, (_problem(task, config, tokenizer) for task in found))
        self.prompt_format = ", ".join(filter(None, ["tags", prompt_format(tokenizer, config)]))

    def get_reward(self, response: str, golden: Mapping[str, Any], finish_reason: FinishReason) -> float:
        """Return 1 for an expression of exactly the given numbers that equals the target, whatever follows it."""
        found = TAGS.find(response)
        if found is None:
            return 0.0
        try:
            value, numbers = evaluate(found.text)
        except BadExpression:
            return float(self.config.format_reward)
        right = sorted(numbers) == sorted(golden["numbers"]) and value == golden["target"]
        return 1.0 if right else float(self.config.format_reward)

    def gold_response(self, problem: Problem) -> str:
        if "expression" not in problem.golden:
            raise NotImplementedError("rows of countdown have no right expression, only the target")
        return TAGS.written(problem.golden["expression"])

    def wrong_response(self, problem: Problem) -> str:
        return TAGS.written(" + ".join(map(str, [*problem.golden["numbers"], 1])))


def _problem(task: Mapping[str, Any], config: CountdownConfig, tokenizer: Tokenizer) -> Problem:
    question = PROMPT.format(**task)
    return Problem(render_prompt(tokenizer, question, config), task, questions=frozenset({words_key(question)}))


def _drawn(config: CountdownConfig) -> Iterator[dict[str, Any]]:
    """Generate each problem from its own random numbers, so that raising `draws` only adds problems."""
    for draw in range(config.draws):
        choose = random.Random(stable_key("countdown", config.seed, draw))
        yield _draw(choose, config)


def _draw(choose: random.Random, config: CountdownConfig) -> dict[str, Any]:
    while True:
        count = choose.randint(config.min_numbers, config.max_numbers)
        numbers = [choose.randint(1, config.largest) for _ in range(count)]
        parts = [(Fraction(number), str(number)) for number in numbers]
        while len(parts) > 1:
            left, right = (parts.pop(choose.randrange(len(parts))) for _ in range(2))
            parts.append(_joined(left, right, choose.choice("+-*/" if right[0] else "+-*")))
        target, expression = parts[0]
        if target.denominator == 1 and 1 <= target <= config.largest:
            return {"numbers": numbers, "target": int(target), "expression": expression[1:-1]}


def _joined(left: tuple[Fraction, str], right: tuple[Fraction, str], sign: str) -> tuple[Fraction, str]:
    value = OPERATIONS[sign](left[0], right[0])
    return value, f"({left[1]} {sign} {right[1]})"


def _of_rows(source: CountdownRows) -> Iterator[dict[str, Any]]:
    for row in read_questions(source):
        try:
            numbers, target = json.loads(row.text), int(row.answer)
        except ValueError:
            numbers, target = None, 0
        if not (isinstance(numbers, list) and all(type(number) is int for number in numbers)):
            raise ValueError(
                f"data set {source.path}: expected a list of whole numbers in {source.question} and one in "
                f"{source.answer}, found {row.text!r} and {row.answer!r}"
            )
        yield {"numbers": numbers, "target": target}
