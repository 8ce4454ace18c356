"""Texts of the files that `mrl environments new` writes."""

from __future__ import annotations

from string import Template

CLASS_PYPROJECT = Template("""\
[build-system]
requires = ["setuptools>=64"]
build-backend = "setuptools.build_meta"

[project]
name = "$name"
version = "0.1.0"
description = "An environment for mrl"
requires-python = ">=3.11"
dependencies = []  # mrl itself is not in a package index: install this next to it

[project.entry-points."mrl.environments"]
$name = "$module:$cls"

[tool.setuptools]
packages = ["$module"]
""")

CLASS_MODULE = Template('''\
"""The environment $name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.agent.api import Demonstrator
from megatron_rl.agent.reward_only import RewardOnlyAgent
from megatron_rl.agent.trajectories import Problem
from megatron_rl.inference.api import FinishReason
from megatron_rl.recipe.section import PositiveInt, Section


class ${cls}Config(Section):
    """Values of `environment.args` in a recipe."""

    largest: PositiveInt = 9
    """Largest summand."""


class $cls(RewardOnlyAgent, Demonstrator):
    """Sums of two numbers, to be replaced by a task of your own."""

    Config = ${cls}Config

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
''')

CLASS_TEST = Template("""\
from $module import $cls


def test_a_right_answer_is_worth_more_than_a_wrong_one():
    environment = $cls($cls.Config(), tokenizer=None)
    for problem in environment.training_problems():
        right, wrong = environment.gold_response(problem), environment.wrong_response(problem)
        assert environment.get_reward(right, problem.golden, "stop") == 1.0
        assert environment.get_reward(wrong, problem.golden, "stop") == 0.0


def test_nothing_held_out_is_trained_on():
    environment = $cls($cls.Config(), tokenizer=None)
    held_out = {problem.prompt for problem in environment.evaluation_problems()["held_out"]}
    assert not held_out & {problem.prompt for problem in environment.training_problems()}
""")


AGENT = Template('''\
"""The agent program $name. Each run of it is one rollout, on one problem of problems.jsonl."""

import json
import os
import sys

from openai import OpenAI

MODEL = os.environ["OPENAI_MODEL"]


def main() -> None:
    """Ask for a sum, and once more if the answer is wrong."""
    client = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY name the model in training
    problem = json.loads(sys.stdin.readline())
    messages = [{"role": "user", "content": problem["prompt"]}]
    for attempt in (1, 2):
        choice = client.chat.completions.create(model=MODEL, messages=messages).choices[0]
        answer = choice.message.content or ""
        if answer.strip() == problem["answer"]:
            break
        messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "This is wrong. Reply with the number only."},
        ]
    right = answer.strip() == problem["answer"]
    # The last line is the reward; other numbers are metrics. What is printed before is kept with the rollout.
    print(json.dumps({"reward": right / attempt, "attempts": attempt}))


main()
''')

PROBLEMS = Template(
    "".join(
        f'{{"prompt": "What is {a} plus {b}? Reply with the number only.", "answer": "{a + b}"}}\n'
        for a in range(10)
        for b in range(10)
    )
)

RECIPE = Template("""\
extends: smollm2-135m-chain-sum   # a model that runs on processors; or a recipe closer to yours: `mrl recipes`
name: $name
environment:
  name: program
  args:
    command: ["{python}", agent.py]
    code: [agent.py]
    problems: problems.jsonl
    held_out: 0.1
sampling: {max_new_tokens: 32}
training: {steps: 20, sequence_length: 256}
""")

TASKSET_PYPROJECT = Template("""\
[build-system]
requires = ["setuptools>=64"]
build-backend = "setuptools.build_meta"

[project]
name = "$name"
version = "0.1.0"
description = "An environment of verifiers"
requires-python = ">=3.11"
dependencies = ["verifiers>=0.4,<0.5"]

[tool.setuptools]
packages = ["$module"]
""")

TASKSET_MODULE = Template('''\
"""The task set $name: sums of two numbers, to be replaced by tasks of your own."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["${cls}Taskset"]


class ${cls}Data(vf.TaskData):
    """Data of a task besides its prompt."""

    answer: str


class ${cls}Task(vf.Task[${cls}Data]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Score a finished conversation. Several rewards are added; @vf.metric only records a number."""
        return float(trace.last_reply.strip() == self.data.answer)


class ${cls}Config(vf.TasksetConfig):
    """Settings, as environment.args.env.taskset in a recipe."""

    largest: int = 9


class ${cls}Taskset(vf.Taskset[${cls}Task, ${cls}Config]):
    def load(self) -> list[${cls}Task]:
        """Return all tasks, always in the same order."""
        numbers = range(self.config.largest + 1)
        return [self._task(a, b) for a in numbers for b in numbers]

    def _task(self, a: int, b: int) -> ${cls}Task:
        prompt = f"What is {a} plus {b}? Reply with the number only."
        return ${cls}Task(${cls}Data(prompt=prompt, answer=str(a + b)), self.config.task)
''')
