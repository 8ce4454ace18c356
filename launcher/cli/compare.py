"""mrl compare: several runs beside one another."""

from __future__ import annotations

import json

import click

from launcher.cli.completion import complete_run


@click.command("compare", short_help="Compare runs: what differs, metrics at the end, the best.")
@click.argument("runs", nargs=-1, required=True, metavar="RUN RUN2 ... | SWEEP_DIR", shell_complete=complete_run)
@click.option("--by", default="mean_reward", show_default=True, help="Metric that decides which run is the best.")
@click.option("--lowest", is_flag=True, help="The lowest value of that metric is the best.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: {by, lowest, best, keys, runs: [...]}.")
def command(runs: tuple[str, ...], by: str, lowest: bool, as_json: bool) -> None:
    """Print a line for each run, the best first: the recipe keys in which the runs differ, and metrics at the end, as
    means over the last ten steps, and the newest evaluations.

    A RUN is a run's name, its directory or its job id. A directory that is no run stands for the runs in it, and the
    beginning of several names for all of these: give the folder of a sweep, or what the names of its runs begin with.
    `mrl help --metrics` describes the metrics; those of time, losses and failures are best when low.

    \b
    Exit codes: 0 printed  1 a record cannot be read  2 no such run or metric
    """
    from launcher.cli.show.comparison import comparison_json, show_comparison
    from launcher.errors import BadInput
    from launcher.report.compare import compare
    from launcher.report.compared import read_compared, runs_of

    found = compare(read_compared(runs_of(runs)), by, True if lowest else None)
    if found.best is None:
        known = sorted({name for run in found.runs for line in run.record.lines[-1:] for name in line.values})
        raise BadInput(f"--by {by}: no run has this metric; newest steps have {', '.join(known) or 'nothing yet'}")
    if as_json:
        click.echo(json.dumps(comparison_json(found)))
    else:
        show_comparison(found)
