"""mrl requeue: give the nodes back and restart on others."""

from __future__ import annotations

import json

import click

from launcher.cli.completion import complete_run
from launcher.cli.confirm import certain_run


@click.command("requeue", short_help="Save, give the nodes back, and queue again.")
@click.argument("run", required=False, shell_complete=complete_run)
@click.option("--now", is_flag=True, help="Do not save first.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: {run, run_dir, job_id, done}.")
def command(run: str | None, now: bool, yes: bool, as_json: bool) -> None:
    """Make RUN save, give its nodes back and queue again under the same job id.

    RUN is named as for `mrl cancel`. For a run that has ended, use `mrl resume`.

    \b
    Exit codes: 0 requested  1 failed  2 no such run, or more than one
    """
    from launcher.runs.control import requeue

    status = certain_run(run, "requeue", yes)
    done = requeue(status, now)
    job_id = status.job.job_id if status.job else None
    answer = {"run": status.name, "run_dir": str(status.run.root.absolute()), "job_id": job_id, "done": done}
    click.echo(json.dumps(answer) if as_json else f"{status.name}: {done}")
