"""Sums and products that are hard to compute mentally, with a calculator that the model may call."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from pydantic import model_validator

from megatron_rl.agent.api import Demonstrator
from megatron_rl.agent.datasets import words_key
from megatron_rl.agent.environments.expression import BadExpression, evaluate
from megatron_rl.agent.environments.problem_sets import DrawnProblems, DrawnProblemsConfig
from megatron_rl.agent.environments.reasoning_gym import last_number
from megatron_rl.agent.keys import stable_key
from megatron_rl.agent.tools import BEGIN, END, Tool, ToolAgent, ToolError, render_tool_prompt
from megatron_rl.agent.trajectories import Problem
from megatron_rl.generate.engine.interface import FinishReason
from megatron_rl.model.chat.chat import Chat
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.recipe.chat_section import ChatConfig
from megatron_rl.recipe.section import PositiveInt

NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")
ASKED = "What is {expression}? Call the calculator if you need it, and reply with the number only."


class CalculatorConfig(ChatConfig, DrawnProblemsConfig):
    """Arguments of the environment `calculator`."""

    min_terms: PositiveInt = 2
    """Smallest count of numbers in a problem."""
    max_terms: PositiveInt = 3
    """Largest count of numbers in a problem."""
    digits: PositiveInt = 3
    """Largest number of digits of each number."""
    operations: str = "+-*"
    """Operators to draw from."""
    max_turns: PositiveInt = 4
    """Largest number of responses per problem: calls, and the final answer."""

    @model_validator(mode="after")
    def _fits(self) -> CalculatorConfig:
        if self.min_terms > self.max_terms:
            raise ValueError(f"min_terms {self.min_terms} is larger than max_terms {self.max_terms}")
        if not self.operations or set(self.operations) - set("+-*"):
            raise ValueError(f"operations {self.operations!r}: use one or more of + - *")
        return self


def calculate(expression: str) -> str:
    try:
        value, _ = evaluate(expression)
    except (BadExpression, RecursionError) as error:
        raise ToolError(str(error)) from error
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


CALCULATOR = Tool(
    "calculator", "Computes an arithmetic expression.", {"expression": "Numbers, + - * / and parentheses."}, calculate
)


class Calculator(DrawnProblems, ToolAgent, Demonstrator):
    """Sums and products, with a calculator that the model may call."""

    Config = CalculatorConfig
    config: CalculatorConfig
    compares_answers = True
    tools = (CALCULATOR,)

    @classmethod
    def reward_of_wrong(cls, arguments: CalculatorConfig) -> float:
        return 0.0

    def __init__(self, config: CalculatorConfig, tokenizer: Tokenizer) -> None:
        """Raises ValueError if the model's chat template does not support tools."""
        self.max_turns = config.max_turns
        super().__init__(config, tokenizer, _problems(config, tokenizer))
        if tokenizer.chat_template is not None:
            self.prompt_format = "chat template"

    def get_trajectory_reward(
        self, responses: Sequence[str], golden: Mapping[str, Any], finish_reason: FinishReason
    ) -> float:
        return float(finish_reason == "stop" and self.final_answer(responses[-1]) == golden["answer"])

    def final_answer(self, response: str) -> str | None:
        """Return the last number. Without a chat template the whole response must be a number."""
        if self.tokenizer.chat_template is None and not NUMBER.fullmatch(response):
            return None
        number = last_number(response)
        try:
            return None if number is None else str(Fraction(number))
        except ValueError:
            return None  # more digits than Python converts, and than any answer has

    def demonstrations(self) -> Sequence[tuple[str, str]]:
        """Return demonstrations for a model without a chat template: every other problem uses a call, followed by its
        result; the others are answered directly."""
        pairs = []
        for number, problem in enumerate(self._trained):
            call, answer = f"{BEGIN}{problem.golden['expression']}{END}", problem.golden["answer"]
            if number % 2:
                pairs.append((problem.prompt, answer))
            else:
                pairs += [(problem.prompt, call), (f"{problem.prompt}{call}{answer}", answer)]
        return pairs


def _problems(config: CalculatorConfig, tokenizer: Tokenizer) -> Iterator[Problem]:
    chat = Chat(tokenizer, config.chat_template)
    for number in range(config.draws):
        draw = random.Random(stable_key("calculator", config.seed, number))
        expression = str(draw.randrange(10**config.digits))
        for _ in range(draw.randint(config.min_terms, config.max_terms) - 1):
            expression += draw.choice(config.operations) + str(draw.randrange(10**config.digits))
        if not chat.has_template:
            prompt = f"{expression}="
        else:
            prompt = render_tool_prompt(chat, ASKED.format(expression=expression), (CALCULATOR,))
        golden = {"expression": expression, "answer": calculate(expression)}
        yield Problem(prompt, golden, questions=frozenset({words_key(expression)}))
