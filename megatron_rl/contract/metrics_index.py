"""Index of metrics.jsonl, so that a reader of a long record reads its end.

Rank 0 appends a row for every EVERY lines, with what the warnings of a run need of all lines so far. A row counts if
the record still has its line where the row says. Otherwise an older row counts, or none, and the lines after it are
read: an index may be absent, short or damaged, and costs time then. A run that resumes cuts back the index before the
record.
"""

from __future__ import annotations

import base64
import os
import struct
from collections import deque
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import BinaryIO, NamedTuple

from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.files import again_if_stale, open_regular, read_bytes
from megatron_rl.contract.learning import Hindrance, Recent, number
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import Place, RecordTail, append, decode_lines
from megatron_rl.contract.run_records import IndexRow
from megatron_rl.contract.shapes import LARGEST_FLOAT
from megatron_rl.contract.tail import last_lines
from megatron_rl.contract.window_rules import Watch

EVERY = 256  # lines from one row to the next: what a reader reads besides the index
KEPT = 20  # newest lines that a reader gets in any case


class Summary:
    """Summary of the lines of the record so far: the newest KEPT ones, the warnings, and all rewards."""

    def __init__(self) -> None:
        self.lines: deque[MetricsLine] = deque(maxlen=KEPT)
        self.watch = Watch()
        self.save_s: float | None = None  # seconds of the newest save

    @property
    def step(self) -> int:
        return self.lines[-1].step if self.lines else 0

    def add(self, line: MetricsLine) -> list[Hindrance]:
        """Add the next line; return the warnings that start with it."""
        self.lines.append(line)
        save_s = number(line, "time/save_s")
        self.save_s = self.save_s if save_s is None else save_s
        return self.watch.add(line)


class Indexed(NamedTuple):
    """The lines of a record up to the newest row of its index."""

    summary: Summary
    place: Place  # where they end
    rewards: int  # number of their rewards
    index_end: int  # where the row ends in the index, in bytes


def not_indexed() -> Indexed:
    return Indexed(Summary(), Place(), 0, 0)


def look_up(run: RunDir, last_step: int | None = None) -> Indexed:
    """Find the newest row that the record agrees with; an empty summary if there is none.

    Args:
        last_step: newest step that it may include; None: any.

    Raises:
        OSError: the record exists and cannot be read.
    """
    rows = [one for one in _rows(run.metrics_index) if last_step is None or one.row.step <= last_step]
    if not rows:
        return not_indexed()

    def find() -> Indexed:
        with open_regular(run.metrics) as file:
            for place in reversed(range(len(rows))):
                if lines := _lines_before(file, rows[place].row):
                    return _indexed(rows[: place + 1], lines)
        return not_indexed()

    try:
        return again_if_stale(find)
    except (FileNotFoundError, NotADirectoryError):
        return not_indexed()


class MetricsIndex:
    """Writer of the index: takes each line of the record after those that are `indexed`."""

    def __init__(self, run: RunDir, indexed: Indexed) -> None:
        self._run = run
        self._summary = indexed.summary
        self._end = indexed.place.at
        self._rewards, self._lines = indexed.rewards, 0

    def add(self, line: MetricsLine, size: int) -> list[Hindrance]:
        """Add the next line, of `size` bytes with its line break; return the warnings that start with it."""
        self._end += size
        self._lines += 1
        return self._summary.add(line)

    def write(self) -> None:
        """Write a row if it is due. Raises OSError; the next row then includes this one."""
        if self._lines < EVERY:
            return
        self._lines = 0
        recent, warnings = self._summary.watch.recent, self._summary.watch.warnings
        if any(abs(one) > LARGEST_FLOAT for one in recent.best or ()):  # which a mean of the largest rewards may be
            return
        row = IndexRow(
            step=self._summary.step,
            end=self._end,
            rewards=_packed(recent.rewards[self._rewards :]),
            best=[*recent.best] if recent.best else [],
            varied=recent.varied,
            since={one.name: one.since for one in warnings if one.since is not None},
            save_s=self._summary.save_s,
        )
        with open_regular(self._run.metrics) as file:
            if not _lines_before(file, row):  # a torn line is between the others, which the next start removes
                return
        append(self._run.metrics_index, row)
        self._rewards = len(recent.rewards)


class WatchedRecord:
    """metrics.jsonl of a run as it grows. Of a long record only the end is read."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self.summary = Summary()
        self.tail = RecordTail(MetricsLine, run.metrics, self._begin)

    def new(self) -> list[MetricsLine]:
        """Return the lines that were read; some of them again if a run that resumes has cut the record back. Raises
        OSError."""
        lines = self.tail.new()
        for line in lines:
            self.summary.add(line)
        return lines

    def _begin(self) -> Place:
        self.summary, place, _, _ = look_up(self._run)
        return place


class _Row(NamedTuple):
    row: IndexRow
    rewards: Sequence[float]
    end: int  # in the index, in bytes


def _rows(path: Path) -> list[_Row]:
    """Rows before the first damaged one; none if the index cannot be read."""
    try:
        texts = read_bytes(path).split(b"\n")[:-1]
    except OSError:
        return []
    rows: list[_Row] = []
    at = 0
    for text in texts:
        at += len(text) + 1
        for row in decode_lines(IndexRow, text).records:
            rewards = _unpacked(row.rewards)
            if rewards is not None and (not rows or row.end > rows[-1].row.end):
                rows.append(_Row(row, rewards, at))
        if not rows or rows[-1].end < at:
            break
    return rows


def _packed(numbers: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}d", *numbers)).decode("ascii")


def _unpacked(text: str) -> Sequence[float] | None:
    """Return the numbers; None if the text is not that of some."""
    try:
        data = base64.b64decode(text, validate=True)
        numbers: tuple[float, ...] = struct.unpack(f"<{len(data) // 8}d", data)
    except (ValueError, struct.error):
        return None
    return numbers if all(abs(one) <= LARGEST_FLOAT for one in numbers) else None


def _lines_before(file: BinaryIO, row: IndexRow) -> list[tuple[MetricsLine, bytes]]:
    """Newest KEPT lines of the record up to a row, each with its bytes; none if the record does not agree with it."""
    if file.seek(0, os.SEEK_END) < row.end:
        return []
    texts = last_lines(file, row.end, KEPT)
    lines = [record for text in texts for record in decode_lines(MetricsLine, text).records]
    agrees = len(lines) == len(texts) and lines and lines[-1].step == row.step and texts[-1].endswith(b"\n")
    return [*zip(lines, texts)] if agrees else []


def _indexed(rows: Sequence[_Row], lines: Sequence[tuple[MetricsLine, bytes]]) -> Indexed:
    row, summary = rows[-1].row, Summary()
    summary.lines.extend(line for line, _ in lines)
    rewards = [*chain.from_iterable(one.rewards for one in rows)]
    best = (row.best[0], row.best[1], int(row.best[2])) if len(row.best) == 3 else None
    summary.watch = Watch(Recent(summary.lines, rewards, best, row.varied), row.since)
    summary.save_s = row.save_s
    return Indexed(summary, Place(row.end, lines[-1][1]), len(rewards), rows[-1].end)
