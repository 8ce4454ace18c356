"""mrl report: one page of a run, or several runs beside one another as text and as a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli.completion import complete_run

if TYPE_CHECKING:
    from megatron_rl.contract.paths import RunDir


@click.command("report")
@click.argument("runs", metavar="[RUN]...", nargs=-1, shell_complete=complete_run)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Page to write. Default: RUN/report.html.")
@click.option("--by", metavar="METRIC", help="Of several runs: metric that decides which is the best. [mean_reward]")
@click.option("--lowest", is_flag=True, help="The lowest value of that metric is the best.")
@click.option("--json", "as_json", is_flag=True, help="Of several runs: {by, lowest, best, keys, runs: [...]}.")
@click.option("--open", "opened", is_flag=True, help="Open the page in a browser.")
def command(runs: tuple[str, ...], out: Path | None, by: str | None, lowest: bool, as_json: bool, opened: bool) -> None:
    """Write RUN/report.html, a page of RUN that needs no network and no server: state, curves, rollouts, evaluations,
    use of the GPUs, attempts, recipe and what `mrl explain` finds. Nothing else of the run changes; it may be
    running.

    RUN is a run's name, its directory, its job id, or nothing for the newest.

    Of several runs, print a line for each, the best first: the recipe keys in which they differ, metrics at the end as
    means over the last ten steps, and the newest evaluations. --out writes a page of them too, with their curves over
    one another. A directory that is not a run stands for the runs in it, and the beginning of several names for all of
    these: give the folder of a sweep, or what the names of its runs begin with. Metrics of time, losses and failures
    are best when low.

    \b
    Exit codes: 0 done  1 a record cannot be read, or the page not written  2 no such run or metric, or bad usage
    """
    from launcher.errors import BadInput
    from launcher.report.compared import runs_of
    from launcher.report.write import write_run
    from launcher.runs.find import find, is_run
    from megatron_rl.contract.files import seen

    found = runs_of(runs) if runs else [find(None)]
    if len(found) > 1 or (len(runs) == 1 and not is_run(runs[0]) and seen(Path(runs[0]).is_dir)):
        if opened and not out:
            raise BadInput("--open needs --out FILE, the page of several runs")
        _compare(found, out, by or "mean_reward", lowest, as_json)
    elif by or lowest or as_json:
        raise BadInput("--by, --lowest and --json compare several runs, and one was given")
    else:
        out = out or found[0].report
        click.echo(f"{out}  ({write_run(found[0], out) / 1e6:.2g} MB)")
    if opened and out:
        _open(out.absolute().as_uri())


def _compare(runs: list[RunDir], out: Path | None, by: str, lowest: bool, as_json: bool) -> None:
    from launcher.cli.show.comparison import comparison_json, show_comparison
    from launcher.errors import BadInput
    from launcher.report.compare import compare
    from launcher.report.compared import read_compared
    from launcher.report.write import write_comparison

    comparison = compare(read_compared(runs), by, True if lowest else None)
    if not comparison.ranked:
        known = sorted({name for run in comparison.runs for line in run.record.lines[-1:] for name in line.values})
        raise BadInput(f"--by {by}: no run has this metric; newest steps have {', '.join(known) or 'nothing yet'}")
    if as_json:
        click.echo(json.dumps(comparison_json(comparison)))
    else:
        show_comparison(comparison)
    if out:
        size = write_comparison(comparison, out)
        click.echo(f"{out}  ({size / 1e6:.2g} MB)", err=as_json)


def _open(address: str) -> None:
    import webbrowser

    if not webbrowser.open(address):
        click.echo("note: no browser was found here; copy the file to a machine that has one", err=True)
