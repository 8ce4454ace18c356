"""Programming: the last code block of an answer is run against the tests of its problem.

reward      1                   it passes all of them
            format_reward       it fails one, crashes, takes too long or too much, or was cut off by the length limit
            negative_reward     no code block
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from textwrap import dedent
from typing import Any

from megatron_rl.agent.datasets import DataSet, Question
from megatron_rl.agent.hf_dataset import HFDatasetAgent, HFDatasetConfig
from megatron_rl.agent.trajectories import Problem
from megatron_rl.environments.code.tests import Test, Tests, parse_tests, passes
from megatron_rl.inference.api import FinishReason
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.section import PositiveFloat, PositiveInt

WAITING = 4
"""How many times its processor time a test may take on the clock: the machine has other things to do."""
START_S = 20.0
"""And beside that, until Python has started."""

PROGRAM = "Write a Python program that reads standard input and writes to standard output."
FUNCTION = "Write a Python function {name}, or a class Solution with a method of that name."
PLACE = "Put the whole code into one block that begins with ```python and ends with ```, the last one of your answer."

SAMPLES = Path(__file__).parent / "samples" / "taco.jsonl"


class Rows(DataSet):
    """Where problems come from, and where they stand in a row."""

    structured = True

    question: str = "question"
    """Column of the problem; a.0.b is the field b of the first element of the list in column a."""
    answer: str = "input_output"
    """Column of its tests, as JSON: {"inputs": [...], "outputs": [...]}, with "fn_name" where a function is asked for.
    A text, or in a file of JSON lines the object itself."""


class CodeConfig(HFDatasetConfig):
    """Arguments of the environment `code`."""

    prompt_fields = ("question", "instruction")

    train: Rows | None = None
    """Problems to train on; none: it only evaluates."""
    evaluate: dict[str, Rows] = {}  # type: ignore[assignment]
    """Evaluation sets by name. Their problems are left out of the training set."""
    prompt: str = "{question}\n\n{instruction}"
    """The prompt, in Python's format syntax; {instruction} says whether a program or a function is asked for."""
    format_reward: float = 0.0
    """A program that fails, or one that was cut off."""
    negative_reward: float = 0.0
    """No code block."""
    max_tests: PositiveInt | None = None
    """Tests that an answer has to pass at most, the first ones; default: all."""
    processes: PositiveInt = 4
    """Programs that run at a time, on each rank that generates."""
    test_timeout_s: PositiveInt = 6
    """Processor time of one test, in seconds; on the clock four times as much."""
    test_memory_gib: PositiveFloat = 1.0
    """Memory of one test."""


class ProgramLost(Exception):
    """A program came to no end that it is to be judged by."""


class CodeEnvironment(HFDatasetAgent):
    """Programming problems, answered by Python that is run against tests."""

    Config = CodeConfig  # type: ignore[assignment]  # its data sets have other columns
    config: CodeConfig

    def __init__(self, config: CodeConfig, tokenizer: Tokenizer) -> None:
        """Raises ValueError for data that is not there, is empty, or not as the configuration says."""
        from megatron_rl.agent.sandbox.api import ProcessLimits  # the launcher checks a recipe without it
        from megatron_rl.agent.sandbox.pool import ProgramPool

        super().__init__(config, tokenizer)
        self.prompt_format = ", ".join(filter(None, ["code block", self.prompt_format]))
        self._programs = ProgramPool(config.processes)
        self._limits = ProcessLimits(
            wall_s=WAITING * config.test_timeout_s + START_S,
            cpu_s=config.test_timeout_s,
            memory_bytes=int(config.test_memory_gib * 2**30),
        )

    async def get_reward(self, response: str, golden: Mapping[str, Any], finish_reason: FinishReason) -> float:
        source = last_code_block(response)
        if source is None:
            return float(self.config.negative_reward)
        if finish_reason == "length":
            return float(self.config.format_reward)
        tests = _parsed(golden["answer"])
        for test in tests.cases[: self.config.max_tests]:
            if not await self._passes(source, tests, test):
                return float(self.config.format_reward)
        return 1.0

    async def _passes(self, source: str, tests: Tests, test: Test) -> bool:
        """Raises ProgramLost."""
        from megatron_rl.agent.sandbox.api import Ending

        if tests.function is None:
            outcome = await self._programs.run(source, test.given, self._limits)
        else:
            outcome = await self._programs.call(source, tests.function, test.given, self._limits)
        if outcome.ending is Ending.KILLED:
            raise ProgramLost(str(outcome))
        if outcome.ending is not Ending.OK:
            return False
        return passes(test.expected, outcome.value, function=tests.function is not None)

    def fields(self, question: Question) -> dict[str, Any]:
        tests = _parsed(question.answer)
        task = PROGRAM if tests.function is None else FUNCTION.format(name=tests.function)
        return {**super().fields(question), "instruction": f"{task} {PLACE}"}

    @classmethod
    def sample_arguments(cls) -> Mapping[str, Any]:
        return {"train": {"path": str(SAMPLES)}}

    def gold_response(self, problem: Problem) -> str:
        """Of the samples: other data sets need not have solutions."""
        for line in SAMPLES.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["input_output"] == problem.golden["answer"]:
                return f"```python\n{json.loads(row['solutions'])[0]}\n```"
        raise NotImplementedError("no solution of this problem is known: only the samples have them")

    def wrong_response(self, problem: Problem) -> str:
        return "```python\nprint('no idea')\n```"


def last_code_block(response: str) -> str | None:
    """What is in the last fenced block that is closed; None where there is none, or nothing in it."""
    blocks: list[str] = []
    begun: list[str] | None = None
    for line in response.split("\n"):
        if not line.lstrip().startswith("```"):
            if begun is not None:
                begun.append(line)
        elif begun is None:
            begun = []
        else:
            blocks.append(dedent("\n".join(begun)))  # a block in a list is indented
            begun = None
    return blocks[-1] if blocks and blocks[-1].strip() else None


_parsed = lru_cache(maxsize=256)(parse_tests)  # all answers of a group need the same
