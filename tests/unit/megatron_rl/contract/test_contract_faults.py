"""Records on a failing file system: a read returns the record, unreadable, or absent only if it is absent; a write
succeeds or raises; and no written line is ever damaged by a later one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from fault_injection import ONCE, Clock, Fault, FaultyFiles, Operation, Tally, faults

from megatron_rl.contract.attempt_records import MetricsLine, Outcome
from megatron_rl.contract.records import Lines, Unreadable, append, read, read_lines, write

OLD, NEW = Outcome("drained", 20), Outcome("finished", 40)
FIRST, SECOND, THIRD = (MetricsLine(step, {"loss": 0.5}) for step in (1, 2, 3))
SECONDS = pytest.mark.parametrize("seconds", [ONCE, 60.0])


class Tried(NamedTuple):
    """Result of work with failing operations."""

    operations: list[Operation]
    raised: OSError | None
    found: object


def tried(root: Path, work: Callable[[], object], fault: Fault | None, before: Callable[[], None]) -> Tried:
    """before: creates the initial files."""
    root.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        Clock(patch)
        files = FaultyFiles(root, patch)
        files.remember()
        with files.aside():
            before()
        files.fail(fault)
        try:
            return Tried(files.operations, None, work())
        except OSError as error:
            return Tried(files.operations, error, None)


def sweep(
    folder: Path, seconds: float, work: Callable[[Path], object], before: Callable[[Path], None]
) -> tuple[list[tuple[Fault, Path, Tried]], Tally]:
    numbers, tally = itertools.count(), Tally()
    whole = folder / "whole"
    operations = tried(whole, lambda: work(whole / "file"), None, lambda: before(whole / "file")).operations
    results = []
    for fault in faults(operations, None, seconds):
        root = folder / str(next(numbers))
        path = root / "file"
        results.append((fault, path, tried(root, lambda: work(path), fault, lambda: before(path))))  # noqa: B023
        tally.count(fault, operations[fault.at].kind)
    assert results
    return results, tally


@SECONDS
def test_reading_returns_the_record_or_unreadable_and_absent_only_without_a_file(tmp_path, record_property, seconds):
    results, tally = sweep(tmp_path, seconds, lambda path: read(Outcome, path), lambda path: write(path, OLD))
    for fault, _, done in results:
        absent = fault.kind == "older"  # the file was not there
        assert done.raised is None
        assert done.found == OLD or isinstance(done.found, Unreadable) or absent, (fault, done)
    tally.report("read", record_property)
    assert tally.operations == {"open", "stat", "read"}


@SECONDS
def test_failed_write_keeps_the_old_record(tmp_path, record_property, seconds):
    results, tally = sweep(tmp_path, seconds, lambda path: write(path, NEW), lambda path: write(path, OLD))
    for fault, path, done in results:
        assert read(Outcome, path) == (NEW if done.raised is None else OLD), fault
    tally.report("write", record_property)
    assert tally.operations >= {"create", "write", "fsync", "close", "rename"}


@SECONDS
def test_failed_append_is_reported_and_damages_no_other_line(tmp_path, record_property, seconds):
    results, tally = sweep(tmp_path, seconds, lambda path: append(path, SECOND, True), lambda path: append(path, FIRST))
    for fault, path, done in results:
        append(path, THIRD)  # the next one
        found = read_lines(MetricsLine, path)
        assert isinstance(found, Lines)
        steps = [line.step for line in found.records]
        assert steps == [1, 2, 3] or (done.raised is not None and steps == [1, 3]), (fault, steps)
        assert len(found.damaged) <= (seconds != ONCE), fault  # what is torn is taken back where that is possible
    tally.report("append", record_property)
    assert tally.operations >= {"create", "read", "write", "fsync", "close"}


@SECONDS
def test_reading_lines_returns_them_or_unreadable_and_absent_only_without_a_file(tmp_path, record_property, seconds):
    results, tally = sweep(
        tmp_path, seconds, lambda path: read_lines(MetricsLine, path), lambda path: append(path, FIRST)
    )
    for fault, _, done in results:
        assert done.raised is None
        if isinstance(done.found, Lines) and not done.found.absent:
            assert done.found.records == [FIRST] or (fault.kind == "garbage" and done.found.damaged), fault
        else:
            assert isinstance(done.found, Unreadable) or fault.kind == "older", (fault, done)
    tally.report("read_lines", record_property)
