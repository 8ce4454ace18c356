"""Package written by `mrl environments new`: one environment, its entry point and a test."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator
from pathlib import Path
from string import Template

from launcher.errors import BadInput, Failed
from megatron_rl.agent.registry import environment_names

PYPROJECT = Template("""\
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

MODULE = Template('''\
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

TEST = Template("""\
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


def write_package(name: str, folder: Path) -> Iterator[Path]:
    """Write the files of a package and yield them.

    Raises:
        BadInput: the name is invalid or taken, or the directory exists.
        Failed: a file cannot be written.
    """
    module = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) or keyword.iskeyword(module):
        raise BadInput(
            f"{name!r} is not a valid name: use a small letter, then small letters, digits and single dashes"
        )
    if name in environment_names():
        raise BadInput(f"an environment {name!r} is already registered; see `mrl environments`")
    values = {"name": name, "module": module, "cls": "".join(part.capitalize() for part in name.split("-"))}
    files = {
        "pyproject.toml": PYPROJECT,
        f"{module}/__init__.py": MODULE,
        f"tests/test_{module}.py": TEST,
    }
    try:
        folder.mkdir(parents=True)
        for file, template in files.items():
            path = folder / file
            path.parent.mkdir(exist_ok=True)
            path.write_text(template.substitute(values), encoding="utf-8")
            yield path
    except FileExistsError as error:
        raise BadInput(f"{folder} already exists; choose another directory with --into") from error
    except OSError as error:
        raise Failed(f"{error.filename or folder}: cannot be written: {error.strerror}") from error
