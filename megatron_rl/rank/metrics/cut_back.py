"""Cuts the record of a run back to the checkpoint that it resumes from.

The file is truncated where the line of that step ends, which is one operation of the file system: a crash leaves either
the old record, which the next start cuts again, or the new one. Only if damaged lines stand before lines that stay is
the whole file written again, under a temporary name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.files import open_regular, read_bytes, until_written, write_atomic
from megatron_rl.contract.metrics_index import MetricsIndex, look_up, not_indexed
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import Unreadable, decode_lines, patiently

PATIENCE_S = 30.0  # seconds to retry a record that cannot be read at the start, for example on a stale mount


class _Scan(NamedTuple):
    """Lines of a record after an offset."""

    end: int  # of the lines that stay, up to the first other line
    further: bool  # whether lines that stay follow that one, or the last one has no line break
    step: int | None  # of the last line that stays; None: none stays
    damaged: tuple[int, str] | None  # offset of the first damaged line, and what is wrong with it


def resume_record(run: RunDir, last_step: int) -> tuple[MetricsIndex, Iterator[tuple[MetricsLine, int]]]:
    """Cut metrics.jsonl and its index back to `last_step`; 0: a run starts. Raises OSError as `cut_back` does.

    Returns the index, and the lines that it misses, each with its bytes.
    """
    found = patiently(run.metrics, lambda: look_up(run, last_step), not_indexed(), PATIENCE_S)
    if isinstance(found, Unreadable):
        raise OSError(str(found))
    cut(run.metrics_index, found.index_end)  # first: a row must not outlive its line
    last = last_step if last_step > 0 else None
    cut_back(run.metrics, last, found.place.at, found.summary.step, every_step=True)
    return MetricsIndex(run, found), lines_from(run.metrics, found.place.at)


def cut_back(
    path: Path,
    last_step: int | None,
    begin: int = 0,
    begin_step: int | None = None,
    *,
    has_last: bool = True,
    every_step: bool = False,
) -> None:
    """Drop torn lines and those after `last_step` (None: all), whose steps will run again.

    Args:
        begin: offset up to which all lines are known to be good, and to stay.
        begin_step: step of the last line before it.
        has_last: whether the line of `last_step` was written before that step was saved.
        every_step: whether the file has a line of every step.

    Raises:
        OSError: the file cannot be read, or the line of `last_step` is missing although every step has one, or while
            other lines are damaged. A file system may show garbage for a moment, and removing it would lose the record.
            And a record without the step does not lead to its checkpoint.
    """
    found = patiently(path, lambda: _scan(path, last_step, begin), _Scan(begin, False, None, None), PATIENCE_S)
    if isinstance(found, Unreadable):
        raise OSError(str(found))
    step = begin_step if found.step is None else found.step
    if has_last and last_step is not None and step != last_step and (found.damaged or every_step):
        raise OSError(_without(path, last_step, found.damaged))
    if found.further:
        data = read_bytes(path)
        kept = [text for text in data[begin:].split(b"\n") if _step_of(text, last_step) is not None]
        whole = (data[:begin] + b"".join(text + b"\n" for text in kept)).decode("utf-8")
        until_written(path, lambda: write_atomic(path, whole))
    else:
        cut(path, found.end)


def cut(path: Path, end: int) -> None:
    """Truncate a file if it is longer. Raises OSError."""

    def shorten() -> None:
        with suppress(FileNotFoundError):
            if path.stat().st_size > end:
                os.truncate(path, end)

    until_written(path, shorten)


def lines_from(path: Path, begin: int) -> Iterator[tuple[MetricsLine, int]]:
    """Yield the lines of a record after an offset, each with its bytes. Raises OSError."""
    if not path.exists():
        return
    with open_regular(path) as file:
        file.seek(begin)
        for text in file:
            for line in decode_lines(MetricsLine, text).records:
                yield line, len(text)


def _without(path: Path, last_step: int, damaged: tuple[int, str] | None) -> str:
    """Message about a record without the line of `last_step`. Raises OSError."""
    if damaged is None:
        return (
            f"{path}: the line of step {last_step} is missing, although the checkpoint to resume from was saved after "
            "it. Restore the file, or remove the newer checkpoints to resume from an earlier one"
        )
    at, why = damaged
    line = read_bytes(path).count(b"\n", 0, at) + 1
    return (
        f"{path}: line {line} {why}, and that of step {last_step} is missing: the file system may have damaged it. "
        "Restore the file, or start another run"
    )


def _scan(path: Path, last_step: int | None, begin: int) -> _Scan:
    at = end = begin
    step, damaged, further = None, None, False
    with open_regular(path) as file:
        file.seek(begin)
        for text in file:
            its = _step_of(text, last_step)
            if its is not None:
                step, further = its, further or end != at or not text.endswith(b"\n")
                end = end if further else at + len(text)
            elif damaged is None and (found := decode_lines(MetricsLine, text).damaged):
                damaged = at, found[0].why
            at += len(text)
    return _Scan(end, further, step, damaged)


def _step_of(text: bytes, last_step: int | None) -> int | None:
    """Step of a line that stays; None for others."""
    lines = [] if last_step is None else decode_lines(MetricsLine, text).records
    return lines[0].step if lines and last_step is not None and lines[0].step <= last_step else None
