"""mrl status: how a run stands, and what it waits for."""

from __future__ import annotations

import json
from typing import Any

import click

from launcher.cli.completion import complete_run
from megatron_rl.contract.codes import EXIT_FINISHED, EXIT_UNKNOWN


@click.command("status", short_help="Say how a run stands and what it waits for.")
@click.argument("run", required=False, shell_complete=complete_run)
@click.option("--all", "every", is_flag=True, help="Every run that is queued or running.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object; with --all: {runs: [...]}.")
@click.pass_context
def command(context: click.Context, run: str | None, every: bool, as_json: bool) -> None:
    """Say what RUN does, what it waits for, how far it is and how long it will take.

    RUN is a run's name, its directory, its job id, or nothing for the newest.

    \b
    States: new, queued, requeued, running, saving, finished, stopped (saved and left), failed, cancelled, lost (ended
    without a record), unknown (Slurm cannot be asked; never taken for "gone"), unreadable (its files cannot be read).
    \b
    Goodput is the share of the GPU time held (not of the queue) that went into generation, rewards, log-probs,
    training, refit and evaluation of steps that stayed. What had to be repeated, and what nobody can tell, is lost.
    \b
    Exit codes: 0 data  2 there is no such run  3 unknown, or a part cannot be read: what else can be found out is shown
    """
    from launcher.cli.show.status import status_json, status_lines  # not needed to complete a command line
    from launcher.errors import BadInput
    from launcher.runs.find import find, newest_first
    from launcher.runs.state import UNSURE, read_statuses
    from megatron_rl.contract.paths import RunDir

    if every and run is not None:
        raise BadInput("--all: and a RUN: give one of them")
    if every:
        problems: list[str] = []
        runs = [RunDir(entry.run_dir) for entry in newest_first(unread=problems)]
        for problem in problems:
            click.echo(f"note: {problem}", err=True)
        statuses = [one for one in read_statuses(runs) if one.alive]
    else:
        statuses = read_statuses([find(run)])
    data: list[dict[str, Any]] = [status_json(one) for one in statuses]
    if as_json:
        click.echo(json.dumps({"runs": data} if every else data[0]))
    else:
        click.echo("\n\n".join("\n".join(status_lines(one)) for one in data) or "no run is queued or running")
    unsure = any(one.state in UNSURE for one in statuses) or any(one["unread"] for one in data)
    context.exit(EXIT_UNKNOWN if unsure else EXIT_FINISHED)
