"""mrl report: one page of a run, or of several beside one another."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from launcher.cli.completion import complete_run


@click.command("report", short_help="Write one HTML page of a run, or of several beside one another.")
@click.argument("runs", metavar="[RUN]...", nargs=-1, shell_complete=complete_run)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="File to write. Default: RUN/report.html.")
@click.option("--by", metavar="METRIC", help="Of several runs: metric that decides which is the best.")
@click.option("--follow", is_flag=True, help="Serve the page on this machine, and renew it as the run proceeds.")
@click.option("--open", "opened", is_flag=True, help="Open the page in a browser.")
def command(runs: tuple[str, ...], out: Path | None, by: str | None, follow: bool, opened: bool) -> None:
    """Write RUN/report.html, a page of RUN that needs no network and no server: state, curves, rollouts, evaluations,
    use of the GPUs over time, attempts, recipe and what `mrl explain` finds. Nothing else of the run changes; it may be
    running.

    RUN is a run's name, its directory, its job id, or nothing for the newest. Several runs, or a folder of runs such as
    a sweep's, make one page with their curves over one another and a table of the keys that differ.

    --follow serves the page on a port of this machine to those who have its address, which contains a secret, and
    writes the file too. Ctrl-C ends it; the run is not affected.

    \b
    Exit codes: 0 written  1 a record cannot be read, or the page not written  2 no such run, or bad usage
    """
    from launcher.errors import BadInput
    from launcher.report.compare import compare
    from launcher.report.compared import read_compared, runs_of
    from launcher.report.write import follow_run, write_comparison, write_run
    from launcher.runs.find import find, is_run

    found = runs_of(runs) if runs else [find(None)]
    folder = Path(runs[0]) if len(runs) == 1 and not is_run(runs[0]) and Path(runs[0]).is_dir() else None
    several = len(found) > 1 or folder is not None
    if several and follow:
        raise BadInput(f"--follow shows one run, and {len(found)} were given; name one of them")
    if by and not several:
        raise BadInput("--by orders several runs, and one was given")
    if several and out is None and folder is None:
        raise BadInput("several runs need --out FILE, the page to write")
    file = out or (folder / "report.html" if folder else found[0].report)
    if follow:
        follow_run(found[0], file, lambda address: _announce(address, file, opened), partial(click.echo, err=True))
        return
    if several:
        comparison = compare(read_compared(found), by or "mean_reward")
        if by and comparison.best is None:
            raise BadInput(f"--by {by}: no run has this metric; `mrl help --metrics` lists the metrics")
        size = write_comparison(comparison, file, folder.absolute().name if folder else "Comparison")
    else:
        size = write_run(found[0], file)
    click.echo(f"{file}  ({size / 1e6:.2g} MB)")
    if opened:
        _open(file.absolute().as_uri())


def _announce(address: str, file: Path, opened: bool) -> None:
    import socket

    port = address.partition("127.0.0.1:")[2].partition("/")[0]
    click.echo(f"{address}\n\nwrites {file} too; Ctrl-C ends this. From another machine, first:")
    click.echo(f"    ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}")
    if opened:
        _open(address)


def _open(address: str) -> None:
    import webbrowser

    if not webbrowser.open(address):
        click.echo("note: no browser was found here; copy the file to a machine that has one", err=True)
