"""mrl cancel: end a run, after a save or at once, or make it queue again."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from launcher.cli.arguments import RUN
from launcher.cli.show.terminal import at_terminal

if TYPE_CHECKING:
    from launcher.runs.state import RunStatus


@click.command("cancel")
@RUN
@click.option("--drain", is_flag=True, help="Save first; the run ends as stopped and is not requeued.")
@click.option(
    "--requeue",
    "again",
    is_flag=True,
    help="Save, give the nodes back and queue again under the same job id. Short: mrl requeue.",
)
@click.option("--now", is_flag=True, help="With --requeue: do not save first.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: {run, run_dir, job_id, done}.")
def command(run: str | None, drain: bool, again: bool, now: bool, yes: bool, as_json: bool) -> None:
    """End RUN, given by its name, its directory or its job id. `mrl resume` resumes it.

    Without --drain, training since the last checkpoint may be lost. Without RUN, the only queued or running run is
    meant; the start of a name means the run with that name. Both ask for confirmation, or need --yes. A copy of a run's
    directory does not own its job.

    \b
    Exit codes: 0 requested, or it had already ended  1 failed  2 no such run, or more than one
    """
    from launcher.errors import BadInput
    from launcher.runs.control import cancel, requeue

    if now and not again:
        raise BadInput("--now: only with --requeue; without --drain, mrl cancel does not save")
    if drain and again:
        raise BadInput("--drain and --requeue exclude each other; --requeue saves, unless --now is given")
    status = _certain_run(run, "requeue" if again else "cancel", yes)
    if again:
        done = requeue(status, now)
    else:
        done = cancel(status, drain) if status.alive else f"already ended: {status.state}"
    job_id = status.job.job_id if status.job else None
    answer = {"run": status.name, "run_dir": str(status.run.root.absolute()), "job_id": job_id, "done": done}
    click.echo(json.dumps(answer) if as_json else f"{status.name}: {done}")


def _certain_run(name: str | None, action: str, yes: bool) -> RunStatus:
    """Return the run to end: it is unambiguous, or confirmed at the terminal. Raises BadInput for an ambiguous run
    without a terminal, Failed where the user declines. `action`: verb for the question, such as `cancel`."""
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
