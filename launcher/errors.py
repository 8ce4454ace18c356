"""Errors of the launcher, and how they are shown."""

from __future__ import annotations

import json
from collections.abc import Iterable
from difflib import get_close_matches
from typing import IO, Any

import click

from megatron_rl.contract.codes import EXIT_CRASHED, EXIT_USAGE
from megatron_rl.contract.text import printable_lines


class BadInput(click.ClickException):
    """Unusable input. Each of `problems` is one line: where, what, and what to do."""

    exit_code = EXIT_USAGE

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))

    def show(self, file: IO[Any] | None = None) -> None:
        for problem in self.problems:
            click.echo(f"error: {printable_lines(problem)}", file=file, err=file is None)


def show(error: click.ClickException, as_json: bool) -> None:
    """Print an error on stderr; with `as_json` also {error: [...], exit_code} on stdout, for a caller that asked for
    JSON."""
    problems = list(error.problems) if isinstance(error, BadInput) else [_message(error)]
    if isinstance(error, click.UsageError) and error.ctx is not None:
        problems[-1] += f"; see {error.ctx.command_path} --help"
    if as_json:
        click.echo(json.dumps({"error": problems, "exit_code": error.exit_code}))
    for problem in problems:
        click.echo(f"error: {printable_lines(problem)}", err=True)


RECIPE_OPTIONS = ("-c", "--conf", "--config", "--config-file", "--recipe", "--yaml")
"""Names of other programs for the recipe, which is a positional argument here."""


def _message(error: click.ClickException) -> str:
    """Return the message, with a suggestion for an unknown option. Click's own suggestions are often too far off."""
    if not isinstance(error, click.NoSuchOption):
        return error.format_message()
    names = {parameter.name for parameter in error.ctx.command.params} if error.ctx else set()
    asked = error.option_name
    if "recipe" in names and asked in RECIPE_OPTIONS:
        return f"No such option {asked!r}: RECIPE is the first argument, as in `mrl-submit my.yaml`"
    if "overrides" in names and "." in asked:
        return f"No such option {asked!r}: values of the recipe are set without dashes: {asked.lstrip('-')}=VALUE"
    close = get_close_matches(asked, error.possibilities or (), n=1, cutoff=0.75)
    return error.message + (f" Did you mean {close[0]}?" if close else "")


class Unsure(BadInput):
    """Slurm may or may not have accepted a job, or its id could not be recorded; the run directory is left as it is."""

    exit_code = EXIT_CRASHED


class Failed(BadInput):
    """A valid request failed, or its answer is unknown."""

    exit_code = EXIT_CRASHED
