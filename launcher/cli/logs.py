"""mrl logs: output of the ranks and of the batch script of a run."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click

from launcher.cli.arguments import RUN
from launcher.errors import BadInput, Failed
from megatron_rl.contract.paths import RunDir

BATCH = "batch"  # role
BLOCK = 1 << 16
TICK = 0.3  # seconds between two reads of the files
ASK_EVERY_S = 10.0  # seconds between two checks that the run is alive


@click.command("logs")
@RUN
@click.option("-f", "--follow", is_flag=True, help="Follow the log as it grows, across attempts, until the run ends.")
@click.option(
    "--role",
    help="Source of the log: train, infer-0, teacher-0, supervisor, health, batch, ... [default: train, else batch]",
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
        if attempt is not None and attempt > found.last_attempt():
            count = found.last_attempt()
            there = f"there {'is' if count == 1 else 'are'} {count}" if count else "there is none yet"
            raise BadInput(f"{found.root.name}: no attempt {attempt}; {there}")
        if listing:
            files = log_files(found, attempt)
            click.echo(json.dumps({"files": [str(path) for path in files]}) if as_json else "\n".join(map(str, files)))
            return
        log = LogFollower(found, role, rank, attempt, lines)
        seen = _print(log, as_json)
        if follow:
            _follow(log, as_json)
        elif not seen and log.path is None:
            if role is None and not found.attempt(attempt or found.last_attempt()).log(0).is_file():
                raise Failed(f"{found.root.name}: the ranks have no log yet; --list names the existing logs")
            raise BadInput(f"{found.root.name}: {missing(found, role or 'train', rank, attempt)}")
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
    try:
        found = list(log.poll())
    except OSError as error:
        raise Failed(f"{log.run.root.name}: {error.filename or log.path}: {error.strerror}") from error
    for line in found:
        click.echo(json.dumps(line._asdict()) if as_json else line.line)
    return len(found)


class LogLine(NamedTuple):
    attempt: int
    """0 for the batch log, which all attempts share."""
    role: str
    rank: int
    line: str


class LogFollower:
    """Reader of one log of a run, from near its end, and then of the next attempt's.

    Args:
        role: None: the training ranks, or the batch log until they have one.
        attempt: None: the newest, and then the next ones.
        lines: number of lines from the end of the first log.
    """

    def __init__(self, run: RunDir, role: str | None, rank: int, attempt: int | None, lines: int) -> None:
        self.run = run
        self.path: Path | None = None
        self._wanted = role, rank, attempt
        self._lines = lines
        self._offset = 0
        self._source = (0, BATCH, 0)

    def poll(self) -> Iterator[LogLine]:
        path, source = self._choose()
        if path is not None and path != self.path:
            yield from self._rest()
            first = self.path is None
            self.path, self._source = path, source
            self._offset = _start_of_last(path, self._lines) if first else 0
        yield from self._rest()

    def _rest(self) -> Iterator[LogLine]:
        if self.path is None:
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.split(b"\n")[:-1]:
            yield LogLine(*self._source, line.decode("utf-8", "replace").rstrip("\r"))

    def _choose(self) -> tuple[Path | None, tuple[int, str, int]]:
        role, rank, attempt = self._wanted
        batch = self.run.batch_log if self.run.batch_log.is_file() else None
        if role == BATCH:
            return batch, (0, BATCH, 0)
        number = attempt or self.run.last_attempt()
        log = self.run.attempt(number).log(rank, role or "train")
        if log.is_file():
            return log, (number, role or "train", rank)
        return (batch if role is None and attempt is None and rank == 0 else None), (0, BATCH, 0)


def log_files(run: RunDir, attempt: int | None) -> list[Path]:
    """Return the logs of an attempt (default: the newest), the stacks that a hang left, and the batch log."""
    folder = run.attempt(attempt or run.last_attempt()).logs
    stacks = [path for path in folder.glob("*.stacks") if path.stat().st_size]  # empty from the start
    return [*([run.batch_log] if run.batch_log.is_file() else []), *sorted([*folder.glob("*.log"), *stacks])]


def missing(run: RunDir, role: str, rank: int, attempt: int | None) -> str:
    roles: dict[str, list[int]] = {BATCH: []} if run.batch_log.is_file() else {}
    for path in log_files(run, attempt):
        name, _, number = path.stem.rpartition(".")
        if path != run.batch_log and path.suffix == ".log" and number.isdigit():
            roles.setdefault(name, []).append(int(number))
    if role in roles:
        return f"{role} has no rank {rank}; its ranks: {', '.join(map(str, sorted(roles[role])))}"
    return f"no log of the role {role}; the roles are: {', '.join(roles)}"


def _start_of_last(path: Path, lines: int) -> int:
    """Return the offset of the last `lines` lines, searching from the end since logs grow to gigabytes."""
    with path.open("rb") as file:
        end = file.seek(0, 2)
        begin, ends, text = end, 0, b""
        while begin > 0 and ends <= lines:
            step = min(BLOCK, begin)
            begin -= step
            file.seek(begin)
            text = file.read(step) + text
            ends = text.count(b"\n")
    parts = text.split(b"\n")
    return end - len(b"\n".join(parts[-lines - 1 :])) if lines else end - len(parts[-1])
