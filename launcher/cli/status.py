"""mrl status: the state of a run, and what it waits for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from launcher.cli.arguments import RUN
from megatron_rl.contract.codes import EXIT_FINISHED, EXIT_UNKNOWN
from megatron_rl.contract.text import printable_lines

if TYPE_CHECKING:
    from megatron_rl.contract.paths import RunDir


@click.command("status")
@RUN
@click.option("--all", "every", is_flag=True, help="Show every queued or running run; with --list: every run.")
@click.option(
    "--list",
    "listing",
    is_flag=True,
    help="List the runs submitted from this account whose directories still exist, newest first. Short: mrl ls.",
)
@click.option(
    "-n", "--limit", type=click.IntRange(min=1), default=20, show_default=True, help="With --list: runs to show."
)
@click.option("--watch", is_flag=True, help="Print what happens until the run has ended; Ctrl-C leaves it running.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; with --all or --list: {runs: [...]}.")
@click.pass_context
def command(
    context: click.Context, run: str | None, every: bool, listing: bool, limit: int, watch: bool, as_json: bool
) -> None:
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
    from launcher.errors import BadInput
    from launcher.runs.find import find

    if every and run is not None:
        raise BadInput("--all and RUN exclude each other")
    if listing and (run is not None or watch):
        raise BadInput(f"--list and {'--watch' if watch else 'RUN'} exclude each other")
    if watch and (every or as_json):
        raise BadInput("--watch shows one run to people; for others: watch -n 10 mrl status --all")
    if listing:
        from launcher.cli.show.lists import list_runs

        list_runs(None if every else limit, as_json)
        return
    if watch:
        from launcher.cli.submit.watch import watch as watch_run

        context.exit(watch_run(find(run)))
    from launcher.cli.show.status_rows import status_json, status_lines  # not needed for completion
    from launcher.runs.state import UNSURE, read_statuses

    statuses = [one for one in read_statuses(_submitted()) if one.alive] if every else read_statuses([find(run)])
    rows = [status_json(one) for one in statuses]
    if as_json:
        click.echo(json.dumps({"runs": rows} if every else rows[0]))
    else:
        text = "\n\n".join("\n".join(status_lines(one)) for one in rows)
        click.echo(printable_lines(text) or "no run is queued or running")
    unsure = any(one.state in UNSURE for one in statuses) or any(row["unread"] for row in rows)
    context.exit(EXIT_UNKNOWN if unsure else EXIT_FINISHED)


def _submitted() -> list[RunDir]:
    from launcher.runs.find import newest_first
    from megatron_rl.contract.paths import RunDir

    problems: list[str] = []
    runs = [RunDir(entry.run_dir) for entry in newest_first(unread=problems)]
    for problem in problems:
        click.echo(f"note: {problem}", err=True)
    return runs
