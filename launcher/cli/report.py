"""mrl report: one page of a run."""

from __future__ import annotations

from pathlib import Path

import click

from launcher.cli.completion import complete_run


@click.command("report", short_help="Write one HTML page of a run: curves, time, recipe, findings.")
@click.argument("run", required=False, shell_complete=complete_run)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="File to write. Default: RUN/report.html.")
@click.option("--open", "opened", is_flag=True, help="Open the page in a browser.")
def command(run: str | None, out: Path | None, opened: bool) -> None:
    """Write RUN/report.html, a page of RUN that needs no network and no server: state, curves, evaluations, use of the
    GPUs over time, attempts, recipe and what `mrl explain` finds. Nothing else of the run changes; it may be running.

    RUN is a run's name, its directory, its job id, or nothing for the newest.

    \b
    Exit codes: 0 written  1 the record cannot be read, or the page not written  2 no such run
    """
    import time
    import webbrowser

    from launcher.errors import Failed
    from launcher.report.page import run_page
    from launcher.report.read import read_report
    from launcher.runs.find import find
    from megatron_rl.contract.files import write_atomic

    found = find(run)
    now = time.time()
    file = out or found.report
    page = run_page(read_report(found, now), now)
    try:
        write_atomic(file, page, durable=False)
    except OSError as error:
        raise Failed(f"{file}: cannot be written: {error.strerror}; --out names another file") from error
    click.echo(f"{file}  ({len(page.encode('utf-8')) / 1e6:.2g} MB)")
    if opened and not webbrowser.open(file.absolute().as_uri()):
        click.echo("note: no browser was found here; copy the file to a machine that has one", err=True)
