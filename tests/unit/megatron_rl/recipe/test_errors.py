"""Location of an error in a task's own code, through frames of mrl and of libraries."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron_rl.agent.scoring import RolloutLimits, score_answer
from megatron_rl.generate.engine.request_limits import refuse_duplicate
from megatron_rl.recipe.errors import PACKAGE, ConfigurationError, TaskFailed, task_location, task_traceback
from megatron_rl.recipe.registry import environment_class

REWARD = """
import json


def reward(row):
    return row["answr"]


def deep(text):
    return json.loads(text)


async def waits(row):
    return reward(row)


def refused(value):
    from megatron_rl.agent.trajectories import check_reward

    check_reward(value)


def broken_engine(call):
    return call()
"""


@pytest.fixture
def mine(tmp_path: Path) -> ModuleType:
    """Code of a task, in its author's folder."""
    return load(tmp_path / "mine.py", REWARD)


def load(file: Path, text: str) -> ModuleType:
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def raised(call: Callable[[], Any]) -> Exception:
    error = asyncio.run(score_answer(call, RolloutLimits(5.0)))
    assert isinstance(error, Exception)
    return error


def test_location_is_the_tasks_own_line_however_deep_a_library_failed(mine: ModuleType) -> None:
    assert task_location(raised(lambda: mine.reward({}))) == 'mine.py:6: return row["answr"]'
    assert task_location(raised(lambda: mine.deep("{"))) == "mine.py:10: return json.loads(text)"
    assert task_location(raised(lambda: mine.waits({}))) == 'mine.py:6: return row["answr"]'
    assert task_location(raised(lambda: mine.refused(1e30))) == "mine.py:20: check_reward(value)"


def test_traceback_starts_in_the_tasks_code(mine: ModuleType) -> None:
    lines = task_traceback(raised(lambda: mine.deep("{"))).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert [line for line in lines if f"{PACKAGE}/" in line] == []
    own = next(place for place, line in enumerate(lines) if "mine.py" in line)
    assert "line 10, in deep" in lines[own] and lines[own + 1].strip() == "return json.loads(text)"
    assert lines[-1].startswith("json.decoder.JSONDecodeError: ")


def test_cause_of_a_bad_configuration_counts_too(mine: ModuleType) -> None:
    with pytest.raises(ConfigurationError) as wrapped:
        try:
            mine.reward({})
        except KeyError as error:
            raise ConfigurationError(str(error)) from error
    wrapped.value.__traceback__ = None  # this test's own frame
    assert task_location(wrapped.value).startswith("mine.py:6: ")
    assert task_traceback(wrapped.value).endswith("KeyError: 'answr'\n")


def test_engine_that_fails_is_not_the_tasks_fault(mine: ModuleType) -> None:
    request: Any = SimpleNamespace(id="a", again=None)
    error = raised(lambda: mine.broken_engine(lambda: refuse_duplicate(request, {"a"})))
    assert "request a is already being answered" in str(error)
    assert (task_location(error), task_traceback(error)) == ("", "")


def test_error_inside_mrl_has_no_location_if_its_package_is_a_link(tmp_path: Path) -> None:
    """Fronts of vLLM, whose Python does not have mrl, import it so."""
    (tmp_path / "megatron_rl").symlink_to(PACKAGE)
    program = """
from megatron_rl.contract.files import write_atomic
from megatron_rl.recipe.errors import task_location
try:
    write_atomic("/there/is/no/folder", "")
except OSError as error:
    print([task_location(error)])
"""
    done = subprocess.run(
        [sys.executable, "-P", "-S", "-c", program],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "['']\n"


def test_syntax_error_has_its_location(tmp_path: Path) -> None:
    with pytest.raises(SyntaxError) as wrong:
        load(tmp_path / "typo.py", "x = 1\ndef reward(row)\n    return 1\n")
    assert task_location(wrong.value) == "typo.py:2: def reward(row)"


def test_installed_environment_is_the_tasks_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = tmp_path / "site-packages"
    info = packages / "installed_task-1.dist-info"
    info.mkdir(parents=True)
    (packages / "neighbour.py").write_text("def fails():\n    raise OSError('gone')\n")
    (packages / "installed_task.py").write_text(
        "import neighbour\n"
        "from megatron_rl.agent.reward_only import RewardOnlyAgent\n"
        "from megatron_rl.recipe.section import Section\n"
        "class Task(RewardOnlyAgent):\n"
        "    class Config(Section):\n"
        "        pass\n"
        "    def __init__(self, config, tokenizer):\n"
        "        neighbour.fails()\n"
        "    training_problems = evaluation_problems = get_reward = None\n"
    )
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: installed-task\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[mrl.environments]\ninstalled-task = installed_task:Task\n")
    monkeypatch.syspath_prepend(str(packages))
    cls = environment_class("installed-task")
    with pytest.raises(OSError, match="gone") as wrong:
        cls(cls.Config(), None)
    wrong.value.__traceback__ = wrong.tb.tb_next  # without this test's own frame
    assert task_location(wrong.value) == "installed_task.py:8: neighbour.fails()"


def test_counted_error_keeps_its_traceback(tmp_path: Path) -> None:
    assert task_traceback(TaskFailed("no answer could be scored", "Traceback ...\n")) == "Traceback ...\n"
    assert task_location(TaskFailed("no answer could be scored")) == ""
