"""The package that `mrl environments new` writes: one environment, its entry point and a test."""

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
dependencies = []  # mrl itself is in no package index: install this beside it

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
from megatron_rl.section import PositiveInt, Section


class ${cls}Config(Section):
    """What a recipe may say under `environment.args`."""

    largest: PositiveInt = 9
    """Largest number that is added."""


class $cls(RewardOnlyAgent, Demonstrator):
    """Sums of two numbers, to be replaced by a task of your own."""

    Config = ${cls}Config

    def training_problems(self) -> Sequence[Problem]:
        """Each one once, in an order that is always the same."""
        return [problem for index, problem in enumerate(self._problems()) if index % 5]

    def evaluation_problems(self) -> Mapping[str, Sequence[Problem]]:
        """Sets by name; nobody trains on these."""
        return {"held_out": self._problems()[::5]}

    def get_reward(self, response: str, golden: Mapping[str, Any], finish_reason: FinishReason) -> float:
        """What an answer is worth. `golden` is what its problem was given; `async def` where scoring waits."""
        return float(response.strip() == golden["answer"])

    def demonstrations(self) -> Sequence[tuple[str, str]]:
        """Prompts and right answers that a tiny model is taught first, for `model.init: supervised` alone."""
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
    """The files, as they are written. Raises BadInput for a name that cannot be one or is taken, and for a directory
    that is there already; Failed where it cannot be written."""
    module = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) or keyword.iskeyword(module):
        raise BadInput(f"{name!r} cannot be a name: small letters, digits and single dashes, a letter first")
    if name in environment_names():
        raise BadInput(f"an environment called {name!r} is registered already; see `mrl environments`")
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
        raise BadInput(f"{folder} exists already; name another directory with --into") from error
    except OSError as error:
        raise Failed(f"{error.filename or folder}: cannot be written: {error.strerror}") from error
