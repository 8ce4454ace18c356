"""mrl cancel: end a run, after a save or at once."""

from __future__ import annotations

import json

import click

from launcher.cli.completion import complete_run
from launcher.cli.confirm import certain_run


@click.command("cancel", short_help="End a run, after a save or at once.")
@click.argument("run", required=False, shell_complete=complete_run)
@click.option("--drain", is_flag=True, help="Save first; the run ends as stopped and is not requeued.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask whether it is the run that is meant.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object: {run, run_dir, job_id, done}.")
def command(run: str | None, drain: bool, yes: bool, as_json: bool) -> None:
    """End RUN: a run's name, its directory or the id of its job. `mrl resume` goes on with it.

    Without --drain what was trained since the last checkpoint may be lost. Without RUN, the only run that is queued or
    running is meant, and with the beginning of a name the run that has it; both are asked about, or need --yes. A copy
    of a run's directory has no part in its job.

    \b
    Exit codes: 0 asked for, or it had ended already  1 could not be done  2 there is no such run, or more than one
    """
    from launcher.runs.control import cancel

    status = certain_run(run, "cancel", yes)
    done = cancel(status, drain) if status.alive else f"has ended already: {status.state}"
    job_id = status.job.job_id if status.job else None
    answer = {"run": status.name, "run_dir": str(status.run.root.absolute()), "job_id": job_id, "done": done}
    click.echo(json.dumps(answer) if as_json else f"{status.name}: {done}")
