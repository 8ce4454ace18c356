"""mrl status: the state of a run, and what it waits for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from launcher.cli.arguments import RUN
from megatron_rl.contract.codes import EXIT_FINISHED, EXIT_UNKNOWN

if TYPE_CHECKING:
    from launcher.cli.show.history import HistoryReader
    from launcher.cli.show.live import Look
    from megatron_rl.contract.paths import RunDir


@click.command("status", short_help="Show the state of a run and what it waits for.")
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
@click.option("--watch", is_flag=True, help="Show changes until the run has ended; q or Ctrl-C leaves.")
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
    With --watch a terminal shows a view that redraws itself, every 2 s, or 10 s where Slurm is asked. A pipe or file
    gets a block for each change, with --json an object a line. With --all it shows runs as they come and go.
    \b
    Exit codes: 0 shown  2 no such run  3 unknown, or partly unreadable: everything else is shown
    """
    from launcher.errors import BadInput
    from launcher.runs.find import find

    if every and run is not None:
        raise BadInput("--all and RUN exclude each other")
    if listing:
        if run is not None or watch:
            raise BadInput(f"--list and {'--watch' if watch else 'RUN'} exclude each other")
        from launcher.cli.show.lists import list_runs

        list_runs(None if every else limit, as_json)
        return
    reader = StatusReader(None if every else find(run))
    if watch:
        from launcher.cli.show.live import watch as watch_status

        found = watch_status(reader.look, as_json, every)
    else:
        from launcher.cli.show.status_rows import status_lines

        found = reader.look()
        if as_json:
            click.echo(json.dumps({"runs": found.rows} if every else found.rows[0]))
        else:
            text = "\n\n".join("\n".join(status_lines(one)) for one in found.rows)
            click.echo(text or "no run is queued or running")
    context.exit(EXIT_UNKNOWN if found.unsure else EXIT_FINISHED)


class StatusReader:
    """Reader of the status of one run, or of all that are alive (`run` is None), again and again."""

    def __init__(self, run: RunDir | None) -> None:
        self._run = run
        self._readers: dict[tuple[str, int], HistoryReader] = {}
        self._noted: set[str] = set()

    def look(self) -> Look:
        from launcher.cli.show.history import HistoryReader
        from launcher.cli.show.live import Look
        from launcher.cli.show.status_rows import status_json  # not needed for completion
        from launcher.runs.state import UNSURE, read_statuses

        statuses = read_statuses(self._alive() if self._run is None else [self._run])
        if self._run is None:
            statuses = [one for one in statuses if one.alive]
        before, self._readers = self._readers, {}
        rows: list[dict[str, Any]] = []
        for one in statuses:
            key = (str(one.run.root), one.attempt)
            known = before.get(key)
            self._readers[key] = known or HistoryReader(one.run, one.run.attempt(one.attempt), one.steps)
            rows.append(status_json(one, self._readers[key]))
        unsure = any(one.state in UNSURE for one in statuses) or any(row["unread"] for row in rows)
        return Look(rows, unsure, self._run is not None and not any(one.alive for one in statuses))

    def _alive(self) -> list[RunDir]:
        from launcher.runs.find import newest_first
        from megatron_rl.contract.paths import RunDir

        problems: list[str] = []
        runs = [RunDir(entry.run_dir) for entry in newest_first(unread=problems)]
        for problem in problems:
            if problem not in self._noted:
                click.echo(f"note: {problem}", err=True)
            self._noted.add(problem)
        return runs
