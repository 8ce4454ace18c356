"""Logs of a run: the output of its ranks and of its batch script."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from launcher.errors import BadInput, Failed
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.text import whole_number

BATCH = "batch"  # role
BLOCK = 1 << 16


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
            self._offset = start_of_last(path, self._lines) if first else 0
        yield from self._rest()

    def new_lines(self) -> list[LogLine]:
        """Return what was written since the last call. Raises Failed where the log cannot be read."""
        try:
            return list(self.poll())
        except OSError as error:
            raise Failed(f"{self.run.root.name}: {error.filename or self.path}: {error.strerror}") from error

    def refuse_missing(self) -> None:
        """Raise BadInput or Failed where the log does not exist yet."""
        (role, rank, attempt), run = self._wanted, self.run
        if self.path is not None:
            return
        if role is None and not run.attempt(attempt or run.last_attempt()).log(0).is_file():
            raise Failed(f"{run.root.name}: the ranks have no log yet; --list names the existing logs")
        raise BadInput(f"{run.root.name}: {missing(run, role or 'train', rank, attempt)}")

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


def refuse_absent_attempt(run: RunDir, attempt: int | None) -> None:
    """Raise BadInput for an attempt that a run has not had."""
    count = run.last_attempt()
    if attempt is not None and attempt > count:
        there = f"there {'is' if count == 1 else 'are'} {count}" if count else "there is none yet"
        raise BadInput(f"{run.root.name}: no attempt {attempt}; {there}")


def log_files(run: RunDir, attempt: int | None) -> list[Path]:
    """Return the logs of an attempt (default: the newest), the stacks that a hang left, and the batch log."""
    folder = run.attempt(attempt or run.last_attempt()).logs
    stacks = [path for path in folder.glob("*.stacks") if path.stat().st_size]  # empty from the start
    return [*([run.batch_log] if run.batch_log.is_file() else []), *sorted([*folder.glob("*.log"), *stacks])]


def missing(run: RunDir, role: str, rank: int, attempt: int | None) -> str:
    roles: dict[str, list[int]] = {BATCH: []} if run.batch_log.is_file() else {}
    for path in log_files(run, attempt):
        name, _, number = path.stem.rpartition(".")
        its_rank = whole_number(number)
        if path != run.batch_log and path.suffix == ".log" and its_rank is not None:
            roles.setdefault(name, []).append(its_rank)
    if role in roles:
        return f"{role} has no rank {rank}; its ranks: {', '.join(map(str, sorted(roles[role])))}"
    return f"no log of the role {role}; the roles are: {', '.join(roles)}"


def start_of_last(path: Path, lines: int) -> int:
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
