"""attempts.jsonl: a line for each start and end of an attempt."""

from __future__ import annotations

import sys

from megatron_rl.contract.attempt_records import LEDGER, AttemptEnd, AttemptStart, LedgerLine
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.records import PATIENCE_S, Unreadable, UnreadableRecord, append, read_lines


def read_ledger(run: RunDir, patience: float = PATIENCE_S) -> list[LedgerLine]:
    """All readable lines, oldest first; torn lines are skipped. Raises UnreadableRecord after `patience` seconds.

    Of several starts, or ends, of one attempt the last counts: the disk had reported the earlier ones as not written.
    """
    found = read_lines(LEDGER, run.attempts_ledger, patience)
    if isinstance(found, Unreadable):
        raise UnreadableRecord(str(found))
    newest = {(type(line), line.attempt): line for line in found.records}
    return [line for line in found.records if line is newest[type(line), line.attempt]]


def read_ledger_or_complain(run: RunDir) -> list[LedgerLine]:
    """All readable lines; none where the ledger cannot be read at all, with the error in the log."""
    try:
        return read_ledger(run)
    except UnreadableRecord as error:
        print(error, file=sys.stderr)
        return []


def newest_line(run: RunDir) -> LedgerLine | None:
    lines = read_ledger(run)
    return lines[-1] if lines else None


def write_line(run: RunDir, line: LedgerLine, patience: float = 0.0) -> None:
    append(run.attempts_ledger, line, durable=True, patience=patience)


def starts_in(lines: list[LedgerLine]) -> list[AttemptStart]:
    return [line for line in lines if isinstance(line, AttemptStart)]


def ends_in(lines: list[LedgerLine]) -> list[AttemptEnd]:
    return [line for line in lines if isinstance(line, AttemptEnd)]


def start_of(lines: list[LedgerLine], attempt: int) -> AttemptStart | None:
    return next((start for start in starts_in(lines) if start.attempt == attempt), None)


def unended(lines: list[LedgerLine]) -> list[AttemptStart]:
    ended = {end.attempt for end in ends_in(lines)}
    return [start for start in starts_in(lines) if start.attempt not in ended]


def newest_known_checkpoint(run: RunDir) -> int:
    """Step of the newest checkpoint, 0 before the first; by the ledger where the folder cannot be listed."""
    try:
        return (run.checkpoint_steps() or [0])[0]
    except OSError as error:
        print(f"{run.checkpoints}: {error.strerror}", file=sys.stderr)
    return max([end.checkpoint for end in ends_in(read_ledger_or_complain(run))] or [0])


def point_latest(attempt: Attempt, tag: str) -> None:
    """Link logs/latest to this attempt's logs; `tag` is unique to this process. Raises OSError."""
    fresh = attempt.latest_logs.with_name(f".latest.{tag}")
    if fresh.is_symlink():
        fresh.unlink()
    fresh.symlink_to(attempt.logs.name)
    fresh.replace(attempt.latest_logs)
