"""What the commands say of themselves, and of what is none of them."""

from __future__ import annotations

import json
import sys

import pytest
from click import ClickException
from click.testing import CliRunner, Result

from launcher.cli.main import main
from launcher.cli.mrl_submit import main as mrl_submit
from launcher.errors import show


def within(*words: str) -> Result:
    """What mrl says, in this process; errors are those that a program shows."""
    return CliRunner().invoke(main, words, prog_name="mrl", standalone_mode=False)


@pytest.mark.parametrize(("name", "command"), [("mrl", main), ("mrl-submit", mrl_submit)])
def test_version(name, command):
    said = CliRunner().invoke(command, ["--version"], prog_name=name)
    assert said.exit_code == 0
    assert said.stdout.startswith(f"{name} ")


def test_help_says_each_command_in_full():
    assert "..." not in within("--help").stdout.partition("Commands:")[2]


def test_environments_as_data(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)  # two seconds to import; described in test_trial.py
    environments = json.loads(within("environments", "--json").stdout)["environments"]
    assert {"arithmetic", "math"} <= {one["name"] for one in environments}


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("statsu", "did you mean status?"),
        ("stop", "did you mean cancel?"),
        ("list", "did you mean ls?"),
        ("submit", "mrl-submit starts a run"),
        ("train", "mrl-submit starts a run"),
        ("zzz", "there are attach, cancel"),
    ],
)
def test_a_command_that_is_none_is_answered_with_the_one_that_may_be_meant(word, said):
    error = within(word).exception
    assert isinstance(error, ClickException)
    assert error.exit_code == 2
    assert error.message.startswith(f"no command is called '{word}'; {said}")


@pytest.mark.parametrize("words", [(), ("convert",)])
def test_alone_it_says_what_there_is(words):
    said = within(*words)
    assert (said.exit_code, said.exception) == (0, None)
    assert said.stdout.startswith(f"Usage: {' '.join(['mrl', *words])} ") and said.stdout.count("\n") > 10


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--config", "RECIPE is the first argument"),
        ("--optimizer.learning_rate", "without dashes, optimizer.learning_rate=VALUE"),
        ("--folow", "Did you mean --follow?"),
        ("--conflate", "No such option '--conflate'.; see mrl-submit --help"),
    ],
)
def test_an_unknown_option_is_answered_with_what_is_meant_or_nothing(option, said, capsys):
    error = CliRunner().invoke(mrl_submit, ["demo", option, "1"], prog_name="mrl-submit", standalone_mode=False)
    show(error.exception, as_json=False)
    assert said in capsys.readouterr().err


def test_help_is_a_command():
    assert within("help").stdout == within("--help").stdout
    said = within("help", "cancel")
    assert (said.exit_code, said.exception) == (0, None)
    assert said.stdout.startswith("Usage: mrl cancel [OPTIONS] [RUN]")
    assert "no command is called 'cancle'; did you mean cancel?" in str(within("help", "cancle").exception)
