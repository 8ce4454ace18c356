"""mrl status: the state of a run, and what it waits for."""

from __future__ import annotations

import json
from typing import Any

import click

from launcher.cli.completion import complete_run
from megatron_rl.contract.codes import EXIT_FINISHED, EXIT_UNKNOWN


@click.command("status", short_help="Show the state of a run and what it waits for.")
@click.argument("run", required=False, shell_complete=complete_run)
@click.option("--all", "every", is_flag=True, help="Show every queued or running run.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; with --all: {runs: [...]}.")
@click.pass_context
def command(context: click.Context, run: str | None, every: bool, as_json: bool) -> None:
    """Show what RUN does, what it waits for, its progress and the time left.

    RUN is a run's name, its directory, its job id, or nothing for the newest.

    \b
    States: new, queued, requeued, running, saving, finished, stopped (saved and ended), failed, cancelled, lost (ended
    without a record), unknown (Slurm does not answer; it may still run), unreadable (its files cannot be read).
    \b
    Goodput is the share of the held GPU time (without queueing) that went into generation, rewards, log-probs,
    training, refit and evaluation of steps that were kept. Lost is time whose results were discarded, or whose use is
    unknown.
    \b
    Exit codes: 0 shown  2 no such run  3 unknown, or partly unreadable: everything else is shown
    """
    from launcher.cli.show.status import status_json, status_lines  # not needed for completion
    from launcher.errors import BadInput
    from launcher.runs.find import find, newest_first
    from launcher.runs.state import UNSURE, read_statuses
    from megatron_rl.contract.paths import RunDir

    if every and run is not None:
        raise BadInput("--all and RUN exclude each other")
    if every:
        problems: list[str] = []
        runs = [RunDir(entry.run_dir) for entry in newest_first(unread=problems)]
        for problem in problems:
            click.echo(f"note: {problem}", err=True)
        statuses = [one for one in read_statuses(runs) if one.alive]
    else:
        statuses = read_statuses([find(run)])
    rows: list[dict[str, Any]] = [status_json(one) for one in statuses]
    if as_json:
        click.echo(json.dumps({"runs": rows} if every else rows[0]))
    else:
        click.echo("\n\n".join("\n".join(status_lines(one)) for one in rows) or "no run is queued or running")
    unsure = any(one.state in UNSURE for one in statuses) or any(one["unread"] for one in rows)
    context.exit(EXIT_UNKNOWN if unsure else EXIT_FINISHED)
