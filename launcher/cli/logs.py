"""mrl logs: output of the ranks and of the batch script of a run."""

from __future__ import annotations

import json
import sys
import time

import click

from launcher.cli.arguments import RUN
from launcher.errors import Failed
from launcher.runs.logs import LogFollower, log_files, refuse_absent_attempt
from megatron_rl.contract.text import with_colours

TICK = 0.3  # seconds between two reads of the files
ASK_EVERY_S = 10.0  # seconds between two checks that the run is alive


@click.command("logs")
@RUN
@click.option("-f", "--follow", is_flag=True, help="Follow the log as it grows, across attempts, until the run ends.")
@click.option(
    "--role",
    help="Source of the log: train, infer-0, reward-0, supervisor, health, batch, ... [default: train, else batch]",
)
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="Rank of the role.")
@click.option("--attempt", type=click.IntRange(min=1), help="[default: the newest]")
@click.option(
    "-n", "--lines", type=click.IntRange(min=0), default=100, show_default=True, help="Lines to print from the end."
)
@click.option("--list", "listing", is_flag=True, help="List the log files, and the stacks of a hang, instead.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: {attempt, role, rank, line} per line, or {files}.")
def command(
    run: str | None,
    follow: bool,
    role: str | None,
    rank: int,
    attempt: int | None,
    lines: int,
    listing: bool,
    as_json: bool,
) -> None:
    """Print a log of RUN, given by its name, its directory, its job id, or nothing for the newest.

    The role `batch` is the output of the batch script, one file for all attempts. Ctrl-C ends --follow, not the run.

    \b
    Exit codes: 0 printed  1 no log yet, or unreadable  2 bad usage: no such run, attempt, role or rank
    """
    from launcher.runs.find import find

    found = find(run)
    try:
        refuse_absent_attempt(found, attempt)
        if listing:
            files = log_files(found, attempt)
            click.echo(json.dumps({"files": [str(path) for path in files]}) if as_json else "\n".join(map(str, files)))
            return
        log = LogFollower(found, role, rank, attempt, lines)
        seen = _print(log, as_json)
        if follow:
            _follow(log, as_json)
        elif not seen:
            log.refuse_missing()
    except KeyboardInterrupt:
        click.echo()
    except BrokenPipeError:  # `mrl logs | head`
        sys.stderr.close()
    except OSError as error:
        if error.filename is None:  # stdout is closed
            raise
        raise Failed(f"{found.root.name}: {error.filename}: {error.strerror}") from error


def _follow(log: LogFollower, as_json: bool) -> None:
    from launcher.runs.state import read_statuses

    asked_at = float("-inf")
    alive = True
    while alive:
        if time.monotonic() >= asked_at + ASK_EVERY_S:
            asked_at = time.monotonic()
            alive = read_statuses([log.run])[0].alive
        time.sleep(TICK)
        try:
            _print(log, as_json)
        except Failed:
            if not alive:
                raise


def _print(log: LogFollower, as_json: bool) -> int:
    found = log.new_lines()
    for line in found:
        click.echo(json.dumps(line._asdict()) if as_json else with_colours(line.line))
    return len(found)
