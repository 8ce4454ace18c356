"""Confirmation of the run that a command is about to end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from launcher.cli.show.terminal import at_terminal

if TYPE_CHECKING:
    from launcher.runs.state import RunStatus


def certain_run(name: str | None, action: str, yes: bool) -> RunStatus:
    """Return the run to end: it is unambiguous, or confirmed at the terminal.

    Args:
        name: run as the user named it; None: not named.
        action: verb for the question, such as `cancel`.
        yes: skip the question.

    Raises:
        BadInput: the run is ambiguous, and there is no terminal to ask at.
        Failed: the user declined.
    """
    from launcher.errors import BadInput, Failed
    from launcher.runs.control import target_of

    target = target_of(name)
    status = target.status
    if not target.doubt or yes:
        return status
    job = f", job {status.job.job_id}" if status.job else ""
    what = f"{action} {status.run.root.absolute()} ({status.state}{job})"
    if not at_terminal():
        raise BadInput(f"{target.doubt}, and this would {what}; give its full name, or confirm with --yes")
    if not click.confirm(f"{target.doubt}: {what}?", err=True):
        raise Failed("nothing was done")
    return status
