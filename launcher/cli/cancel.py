"""mrl cancel: end a run, after a save or at once."""

from __future__ import annotations

import json

import click

from launcher.cli.completion import complete_run
from launcher.cli.confirm import certain_run


@click.command("cancel", short_help="End a run, after a save or at once.")
@click.argument("run", required=False, shell_complete=complete_run)
@click.option("--drain", is_flag=True, help="Save first; the run ends as stopped and is not requeued.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: {run, run_dir, job_id, done}.")
def command(run: str | None, drain: bool, yes: bool, as_json: bool) -> None:
    """End RUN, given by its name, its directory or its job id. `mrl resume` resumes it.

    Without --drain, training since the last checkpoint may be lost. Without RUN, the only queued or running run is
    meant; the start of a name means the run with that name. Both ask for confirmation, or need --yes. A copy of a run's
    directory does not own its job.

    \b
    Exit codes: 0 requested, or it had already ended  1 failed  2 no such run, or more than one
    """
    from launcher.runs.control import cancel

    status = certain_run(run, "cancel", yes)
    done = cancel(status, drain) if status.alive else f"already ended: {status.state}"
    job_id = status.job.job_id if status.job else None
    answer = {"run": status.name, "run_dir": str(status.run.root.absolute()), "job_id": job_id, "done": done}
    click.echo(json.dumps(answer) if as_json else f"{status.name}: {done}")
