"""The examples below the help of all commands are shown, and are commands that can be parsed."""

from __future__ import annotations

import re
import shlex

import click
import pytest
from click.testing import CliRunner

from launcher.cli.main import COMMANDS, EXAMPLES, main
from launcher.cli.mrl_submit import main as mrl_submit


def parsed(command: click.Command, words: list[str], parent: click.Context | None = None) -> None:
    """Parse words as the command would, and those of its subcommand. Raises click.UsageError."""
    with command.make_context(words[0], words[1:], parent=parent) as context:
        if isinstance(command, click.Group) and (left := [*context._protected_args, *context.args]):
            name, chosen, rest = command.resolve_command(context, left)
            assert chosen is not None
            parsed(chosen, [str(name), *rest], context)


def test_every_command_has_an_example():
    assert EXAMPLES.keys() == COMMANDS.keys()


@pytest.mark.parametrize("name", COMMANDS)
def test_an_example_is_shown_and_can_be_parsed(name: str):
    shown = CliRunner().invoke(main, [name, "--help"])
    assert shown.exit_code == 0
    assert f"Example:\n    {EXAMPLES[name]}" in shown.output
    line = re.sub(r'^eval "\$\((.*)\)"$', r"\1", EXAMPLES[name])
    words = shlex.split(line)
    assert words[:2] == ["mrl", name]
    parsed(main, words)


@pytest.mark.parametrize("line", re.findall(r"^  (mrl-submit .*)$", mrl_submit.epilog or "", re.MULTILINE))
def test_an_example_of_a_submission_can_be_parsed(line: str):
    assert line in CliRunner().invoke(mrl_submit, ["--help"]).output
    parsed(mrl_submit, shlex.split(line))
