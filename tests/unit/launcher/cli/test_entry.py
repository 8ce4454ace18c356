"""The programs themselves: Ctrl-C ends them with 130 and no traceback at any moment; every other end keeps its code.
And what the commands say of themselves."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click import ClickException
from click.testing import CliRunner, Result

from launcher.cli.main import main
from launcher.cli.mrl_submit import main as mrl_submit

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


def run(*words: str, at: str = "") -> tuple[int, str, str]:
    """(code, stdout, stderr) of a program, with Ctrl-C pressed as it imports the module `at`."""
    command = [sys.executable, "-c", PROGRAM.format(at=at, words=list(words))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


def within(*words: str) -> Result:
    """What mrl says, in this process; errors are those that a program shows."""
    return CliRunner().invoke(main, words, prog_name="mrl", standalone_mode=False)


@pytest.mark.parametrize("at", ["pathlib", "click", "launcher.cli.completion", "launcher.cli.submit.launch"])
def test_ctrl_c_while_it_loads(at):
    code, out, said = run("mrl-submit", "demo", "--dry-run", at=at)
    assert (code, out, said.strip()) == (130, "", "interrupted")


def test_ctrl_c_within_a_command_of_mrl():
    code, out, said = run("mrl", "recipes", at="launcher.recipe.load")
    assert (code, out, said.strip()) == (130, "", "interrupted")


def test_other_ends_keep_their_codes():
    code, out, said = run("mrl-submit", "demoo")
    assert (code, out) == (2, "")
    assert said.startswith("error: no recipe is called 'demoo'")
    assert run("mrl", "nonsense")[0] == 2
    code, out, _ = run("mrl", "recipes")
    assert code == 0
    assert "demo" in out


@pytest.mark.parametrize(("name", "command"), [("mrl", main), ("mrl-submit", mrl_submit)])
def test_version(name, command):
    said = CliRunner().invoke(command, ["--version"], prog_name=name)
    assert said.exit_code == 0
    assert said.stdout.startswith(f"{name} ")


def test_help_says_each_command_in_full():
    assert "..." not in within("--help").stdout.partition("Commands:")[2]


def test_environments_as_data():
    environments = json.loads(within("environments", "--json").stdout)["environments"]
    assert {"arithmetic", "math"} <= {one["name"] for one in environments}


def test_an_output_that_takes_nothing_is_one_error():
    for words in (("mrl", "recipes"), ("mrl", "--help"), ("mrl-submit", "demo", "--dry-run")):
        command = [sys.executable, "-c", PROGRAM.format(at="", words=list(words))]
        with open("/dev/full", "w") as full:  # noqa: PTH123
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
        said = done.stderr.splitlines()
        assert (done.returncode, said[-1]) == (1, "error: the output cannot be written: No space left on device")


def test_a_directory_that_was_removed_is_said(tmp_path, monkeypatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    code, _, said = run("mrl-submit", "demo", "--dry-run")
    assert (code, said) == (2, "error: the current directory was removed; cd to another one\n")


def test_errors_are_data_where_json_was_asked_for():
    code, out, said = run("mrl-submit", "demoo", "--json")
    assert code == 2
    told = json.loads(out)
    assert told["exit_code"] == 2
    assert told["error"][0].startswith("no recipe is called 'demoo'")
    assert said.startswith("error: no recipe")
    assert json.loads(run("mrl", "status", "--jsn", "--json")[1])["error"][0].startswith("No such option")


@pytest.mark.parametrize(
    ("word", "said"),
    [("statsu", "did you mean status?"), ("submit", "mrl-submit starts a run"), ("zzz", "there are attach, cancel")],
)
def test_a_command_that_is_none_is_answered_with_the_one_that_may_be_meant(word, said):
    error = within(word).exception
    assert isinstance(error, ClickException)
    assert error.exit_code == 2
    assert error.message.startswith(f"no command is called '{word}'; {said}")


def test_help_is_a_command():
    assert within("help").stdout == within("--help").stdout
    said = within("help", "cancel")
    assert (said.exit_code, said.exception) == (0, None)
    assert said.stdout.startswith("Usage: mrl cancel [OPTIONS] [RUN]")
    assert "no command is called 'cancle'; did you mean cancel?" in str(within("help", "cancle").exception)
