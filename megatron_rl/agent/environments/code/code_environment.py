"""Programming problems: the last code block of an answer is run against the tests of its problem.

reward      1                   it passes all tests
            format_reward       it fails a test, crashes, exceeds a limit, or was cut off by the length limit
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
from megatron_rl.agent.environments.code.test_cases import Test, Tests, parse_tests, passes
from megatron_rl.agent.hf_dataset import HFDatasetAgent, HFDatasetConfig
from megatron_rl.agent.scoring import NotJudged
from megatron_rl.agent.trajectories import Problem
from megatron_rl.generate.engine.interface import FinishReason
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.recipe.section import PositiveFloat, PositiveInt

WAITING = 4
"""Wall-clock limit of a test as a multiple of its processor time: the machine is shared with other work."""
START_S = 20.0

PROGRAM = "Write a Python program that reads standard input and writes to standard output."
FUNCTION = "Write a Python function {name}, or a class Solution with a method of that name."
FENCE = "Put the whole code into one block that begins with ```python and ends with ```, the last one of your answer."

SAMPLES = Path(__file__).parent / "samples" / "taco.jsonl"


class CodeRows(DataSet):
    """Data set of problems, and the columns of problem and tests."""

    structured = True

    question: str = "question"
    """Column of the problem; a.0.b is the field b of the first element of the list in column a."""
    answer: str = "input_output"
    """Column of the tests, as JSON: {"inputs": [...], "outputs": [...]}, with "fn_name" if a function is requested.
    Either text, or in a JSON lines file the object itself."""


class CodeEnvironmentConfig(HFDatasetConfig):
    """Arguments of the environment `code`."""

    prompt_fields = ("question", "instruction")

    train: CodeRows | None = None
    """Problems to train on; null: the environment only evaluates."""
    evaluate: dict[str, CodeRows] = {}  # type: ignore[assignment]
    """Evaluation sets by name, each with the keys of `train`. Their problems are excluded from the training set."""
    prompt: str = "{question}\n\n{instruction}"
    """Prompt in Python's format syntax; {instruction} requests a program or a function."""
    format_reward: float = 0.0
    """Reward of a program that fails or was cut off."""
    negative_reward: float = 0.0
    """Reward of an answer without a code block."""
    max_tests: PositiveInt | None = None
    """Largest number of tests per answer, the first ones; default: all."""
    processes: PositiveInt = 4
    """Number of programs that run concurrently on each rank that generates."""
    test_timeout_s: PositiveInt = 6
    """Processor time of one test, in seconds; the wall-clock limit is four times that and 20 s."""
    test_memory_gib: PositiveFloat = 1.0
    """Memory limit of one test, in GiB."""


class CodeEnvironment(HFDatasetAgent):
    """Programming problems, answered by Python programs that are run against tests."""

    Config = CodeEnvironmentConfig  # type: ignore[assignment]  # its data sets have other columns
    config: CodeEnvironmentConfig

    @classmethod
    def reward_of_wrong(cls, arguments: CodeEnvironmentConfig) -> float:
        return max(arguments.format_reward, arguments.negative_reward)

    def __init__(self, config: CodeEnvironmentConfig, tokenizer: Tokenizer) -> None:
        # not needed by the launcher, which only checks arguments
        from megatron_rl.agent.sandbox.limits import ProcessLimits
        from megatron_rl.agent.sandbox.process_pools import ProgramPool

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
        from megatron_rl.agent.sandbox.limits import Ending

        if tests.function is None:
            outcome = await self._programs.run(source, test.given, self._limits)
        else:
            outcome = await self._programs.call(source, tests.function, test.given, self._limits)
        if outcome.ending is Ending.KILLED:
            raise NotJudged(str(outcome))
        if outcome.ending is not Ending.OK:
            return False
        return passes(test.expected, outcome.value, function=tests.function is not None)

    def fields(self, question: Question) -> dict[str, Any]:
        tests = _parsed(question.answer)
        task = PROGRAM if tests.function is None else FUNCTION.format(name=tests.function)
        return {**super().fields(question), "instruction": f"{task} {FENCE}"}

    @classmethod
    def sample_arguments(cls) -> Mapping[str, Any]:
        return {"train": {"path": str(SAMPLES)}}

    def gold_response(self, problem: Problem) -> str:
        for line in SAMPLES.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["input_output"] == problem.golden["answer"]:
                return f"```python\n{json.loads(row['solutions'])[0]}\n```"
        raise NotImplementedError("the solution is unknown: only the sample problems have one")

    def wrong_response(self, problem: Problem) -> str:
        return "```python\nprint('no idea')\n```"


def last_code_block(response: str) -> str | None:
    """Return the content of the last closed code fence; None if there is none, or if it is empty."""
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


_parsed = lru_cache(maxsize=256)(parse_tests)  # all answers of a group share their tests
