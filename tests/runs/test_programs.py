"""The programs themselves: Ctrl-C ends them with 130 and no traceback at any moment; every other end keeps its code."""

from __future__ import annotations

import json
import subprocess
import sys

import commands
import pytest

PROGRAM = """
import sys
class CtrlC:
    def find_spec(self, name, *_):
        if name == {at!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, CtrlC())
sys.argv = {words!r}
from launcher.cli import entry
getattr(entry, sys.argv[0].replace("-", "_"))()
"""


def start(*words: str, at: str = "") -> tuple[int, str, str]:
    """(code, stdout, stderr) of a program that loads, with Ctrl-C pressed as it imports the module `at`."""
    command = [sys.executable, "-c", PROGRAM.format(at=at, words=list(words))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


def run(*words: str) -> tuple[int, str, str]:
    """(code, stdout, stderr) of a program that has been loaded."""
    done = commands.run(words)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("at", ["pathlib", "click", "launcher.cli.completion", "launcher.cli.submit.launch"])
def test_ctrl_c_during_imports_is_one_line_and_exit_code_130(at):
    code, out, said = start("mrl-submit", "demo", "--dry-run", at=at)
    assert (code, out, said.strip()) == (130, "", "interrupted")


def test_ctrl_c_during_a_command_is_one_line_and_exit_code_130():
    code, out, said = start("mrl", "recipes", at="launcher.recipe.load")
    assert (code, out, said.strip()) == (130, "", "interrupted")


def test_bad_usage_exits_with_2_and_success_with_0():
    code, out, said = run("mrl-submit", "demoo")
    assert (code, out) == (2, "")
    assert said.startswith("error: no recipe is called 'demoo'")
    assert run("mrl", "nonsense")[0] == 2
    code, out, _ = run("mrl", "recipes")
    assert code == 0
    assert "demo" in out


def test_full_disk_for_the_output_is_one_error():
    for words in (("mrl", "recipes"), ("mrl", "--help"), ("mrl-submit", "demo", "--dry-run")):
        with open("/dev/full", "w") as full:  # noqa: PTH123
            done = commands.run(words, stdout=full.fileno())
        said = done.stderr.splitlines()
        assert (done.returncode, said[-1]) == (1, "error: the output cannot be written: No space left on device")


def test_removed_working_directory_is_reported(tmp_path, monkeypatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    code, _, said = start("mrl-submit", "demo", "--dry-run")
    assert (code, said) == (2, "error: the current directory was removed; cd to another one\n")


def test_errors_are_json_with_the_option_json():
    code, out, said = run("mrl-submit", "demoo", "--json")
    assert code == 2
    told = json.loads(out)
    assert told["exit_code"] == 2
    assert told["error"][0].startswith("no recipe is called 'demoo'")
    assert said.startswith("error: no recipe")
    assert json.loads(run("mrl", "status", "--jsn", "--json")[1])["error"][0].startswith("No such option")
