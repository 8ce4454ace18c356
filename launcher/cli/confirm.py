"""The question whether the run that a command is about to end is the one that is meant."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from launcher.cli.show.terminal import at_terminal

if TYPE_CHECKING:
    from launcher.runs.state import RunStatus


def certain_run(name: str | None, action: str, yes: bool) -> RunStatus:
    """The run to end, which was named, or confirmed at the terminal.

    Args:
        name: as it was given.
        action: what is about to be done to it, such as `cancel`.
        yes: it is confirmed.

    Raises:
        BadInput: it is not certain which one is meant, and nobody can be asked.
        Failed: it is not the one that was meant.
    """
    from launcher.errors import BadInput, Failed
    from launcher.runs.target import target_of

    target = target_of(name)
    status = target.status
    if not target.doubt or yes:
        return status
    job = f", job {status.job.job_id}" if status.job else ""
    what = f"{action} {status.run.root.absolute()} ({status.state}{job})"
    if not at_terminal():
        raise BadInput(f"{target.doubt}, and this would {what}; name it in full, or confirm it with --yes")
    if not click.confirm(f"{target.doubt}: {what}?", err=True):
        raise Failed("nothing was done")
    return status
