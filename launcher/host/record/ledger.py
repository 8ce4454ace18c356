"""attempts.jsonl: a line for each start and end of an attempt."""

from __future__ import annotations

import sys

from megatron_rl.contract.attempt_records import LEDGER, AttemptEnd, AttemptStart, LedgerLine
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.records import PATIENCE_S, Unreadable, UnreadableRecord, append, read_lines


def read_ledger(run: RunDir, patience: float = PATIENCE_S) -> list[LedgerLine]:
    """All lines that can be read, oldest first; a torn one costs itself. Raises UnreadableRecord.

    Of several starts, or ends, of one attempt the last counts: of those before it the disk had said that they were not
    written.

    Args:
        patience: seconds for which a ledger that cannot be read at all is looked at again.
    """
    found = read_lines(LEDGER, run.attempts_ledger, patience)
    if isinstance(found, Unreadable):
        raise UnreadableRecord(str(found))
    newest = {(type(line), line.attempt): line for line in found.records}
    return [line for line in found.records if line is newest[type(line), line.attempt]]


def read_ledger_or_complain(run: RunDir) -> list[LedgerLine]:
    """All lines that can be read; none, with a word in the log, where the ledger cannot be read at all. For what has to
    be done in any case."""
    try:
        return read_ledger(run)
    except UnreadableRecord as error:
        print(error, file=sys.stderr)
        return []


def newest_line(run: RunDir) -> LedgerLine | None:
    """The last line that can be read; None where there is none. Raises UnreadableRecord."""
    lines = read_ledger(run)
    return lines[-1] if lines else None


def write_line(run: RunDir, line: LedgerLine) -> None:
    """Add a line. Raises OSError."""
    append(run.attempts_ledger, line, durable=True)


def starts_in(lines: list[LedgerLine]) -> list[AttemptStart]:
    return [line for line in lines if isinstance(line, AttemptStart)]


def ends_in(lines: list[LedgerLine]) -> list[AttemptEnd]:
    return [line for line in lines if isinstance(line, AttemptEnd)]


def start_of(lines: list[LedgerLine], attempt: int) -> AttemptStart | None:
    """The start of an attempt; None where there is none on record."""
    return next((start for start in starts_in(lines) if start.attempt == attempt), None)


def unended(lines: list[LedgerLine]) -> list[AttemptStart]:
    """The starts of attempts whose end nobody has recorded."""
    ended = {end.attempt for end in ends_in(lines)}
    return [start for start in starts_in(lines) if start.attempt not in ended]


def newest_known_checkpoint(run: RunDir) -> int:
    """Step of the newest checkpoint, 0 before the first; where the folder cannot be listed, of the newest on record."""
    try:
        return (run.checkpoint_steps() or [0])[0]
    except OSError as error:
        print(f"{run.checkpoints}: {error.strerror}", file=sys.stderr)
    return max([end.checkpoint for end in ends_in(read_ledger_or_complain(run))] or [0])


def point_latest(attempt: Attempt, tag: str) -> None:
    """Have logs/latest lead to this attempt's logs. Raises OSError.

    Args:
        tag: tells this process from others that do the same.
    """
    fresh = attempt.latest_logs.with_name(f".latest.{tag}")
    if fresh.is_symlink():
        fresh.unlink()
    fresh.symlink_to(attempt.logs.name)
    fresh.replace(attempt.latest_logs)
