"""How the launcher refuses its input, and what it could not find out."""

from __future__ import annotations

from collections.abc import Iterable
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


class Unsure(BadInput):
    """Whether Slurm took a job is not known; the run directory stays as that job, if there is one, needs it."""

    exit_code = EXIT_CRASHED


class Failed(BadInput):
    """What was asked for is right, and could not be done or found out."""

    exit_code = EXIT_CRASHED
