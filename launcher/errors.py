"""How the launcher refuses its input, and what it could not find out."""

from __future__ import annotations

import json
from collections.abc import Iterable
from difflib import get_close_matches
from typing import IO, Any

import click

from megatron_rl.contract.codes import EXIT_CRASHED, EXIT_USAGE


class BadInput(click.ClickException):
    """What the user gave cannot be run. Every problem found is one line: where, what, what to do."""

    exit_code = EXIT_USAGE

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))

    def show(self, file: IO[Any] | None = None) -> None:
        for problem in self.problems:
            click.echo(f"error: {problem}", file=file, err=file is None)


def show(error: click.ClickException, as_json: bool) -> None:
    """Say on stderr what is wrong.

    Args:
        as_json: also as one JSON object on stdout, {error: [...], exit_code}, for whoever has asked for JSON there.
    """
    problems = list(error.problems) if isinstance(error, BadInput) else [_message(error)]
    if isinstance(error, click.UsageError) and error.ctx is not None:
        problems[-1] += f"; see {error.ctx.command_path} --help"
    if as_json:
        click.echo(json.dumps({"error": problems, "exit_code": error.exit_code}))
    for problem in problems:
        click.echo(f"error: {problem}", err=True)


RECIPE_OPTIONS = ("-c", "--conf", "--config", "--config-file", "--recipe", "--yaml")
"""What other programs call the option for the file that is our first argument."""


def _message(error: click.ClickException) -> str:
    """What is wrong, and what may be meant: of an unknown option click itself names some that hardly resemble it."""
    if not isinstance(error, click.NoSuchOption):
        return error.format_message()
    names = {parameter.name for parameter in error.ctx.command.params} if error.ctx else set()
    asked = error.option_name
    if "recipe" in names and asked in RECIPE_OPTIONS:
        return f"No such option {asked!r}: RECIPE is the first argument, such as `mrl-submit my.yaml`"
    if "overrides" in names and "." in asked:
        return f"No such option {asked!r}: values of the recipe are given without dashes, {asked.lstrip('-')}=VALUE"
    close = get_close_matches(asked, error.possibilities or (), n=1, cutoff=0.75)
    return error.message + (f" Did you mean {close[0]}?" if close else "")


class Unsure(BadInput):
    """Whether Slurm took a job is not known, or it is not on record; the run directory stays as that job needs it."""

    exit_code = EXIT_CRASHED


class Failed(BadInput):
    """What was asked for is right, and could not be done or found out."""

    exit_code = EXIT_CRASHED
