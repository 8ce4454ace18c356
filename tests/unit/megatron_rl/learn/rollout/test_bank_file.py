"""Files of the bank: records before a damage are read, and a failing disk ends no run."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.learn.rollout.bank import file as file_module
from megatron_rl.learn.rollout.bank.file import BankFile, Entry, Record, bank_files, encode, scan

RECORDS: list[Record] = [({"number": i}, bytes([i]) * (7 * i)) for i in range(4)]


def keep_all(entries: Sequence[Entry], room: int) -> list[Entry]:
    return list(entries)


def writer(path: Path, limit: int = 1 << 30, within: Any = keep_all) -> BankFile:
    return BankFile(path, limit, within)


def write(file: BankFile, *records: Record) -> None:
    file.append(records)
    assert file.wait(timeout_s=20)


def read(path: Path) -> list[Record]:
    """All records whose bodies are good."""
    bodies = [(entry.head, entry.read()) for entry in scan(path)[0]]
    return [(head, body) for head, body in bodies if body is not None]


HEADS = st.dictionaries(
    st.text(max_size=5), st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False)
)


@given(records=st.lists(st.tuples(HEADS, st.binary(max_size=100)), max_size=6))
def test_records_survive_a_round_trip(tmp_path_factory: pytest.TempPathFactory, records: list[Record]) -> None:
    path = tmp_path_factory.mktemp("bank") / "some.bank"
    path.write_bytes(b"".join(encode(*record) for record in records))
    assert read(path) == records
    assert not scan(path)[1]


def test_an_error_in_encoding_a_record_is_raised(tmp_path: Path) -> None:
    file = writer(tmp_path / "some.bank")
    file.append(record for record in [({"reward": float("nan")}, b"")])
    with pytest.raises(ValueError, match="JSON"):
        file.wait(timeout_s=20)
    with pytest.raises(ValueError, match="JSON"):
        file.append(RECORDS)


def test_a_file_cut_at_any_byte_has_a_prefix_of_the_records(tmp_path: Path) -> None:
    whole = b"".join(encode(*record) for record in RECORDS)
    ends = [len(b"".join(encode(*record) for record in RECORDS[:count])) for count in range(len(RECORDS) + 1)]
    path = tmp_path / "some.bank"
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        count = sum(end <= length for end in ends) - 1
        assert read(path) == RECORDS[:count], length
        assert scan(path)[1] == (length not in ends), length


def test_one_wrong_bit_anywhere_costs_a_body_or_the_rest_of_the_file(tmp_path: Path) -> None:
    whole = b"".join(encode(*record) for record in RECORDS)
    path = tmp_path / "some.bank"
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        found = read(path)
        assert len(found) < len(RECORDS) and all(record in RECORDS for record in found), bit


def test_compaction_keeps_chosen_records_and_adds_those_of_other_files(tmp_path: Path) -> None:
    old = tmp_path / "attempt-001.driver-00003.bank"
    write(writer(old), ({"number": 8}, b"eight"), ({"number": 9}, b"nine"))
    file = writer(tmp_path / "attempt-002.driver-00000.bank")
    write(file, *RECORDS)
    nine = scan(old)[0][1]
    file.compact(lambda entries: [entry for entry in entries if entry.head["number"] in (1, 3, 9)], [nine], [old])
    write(file, ({"number": 4}, b"four"))
    assert bank_files(tmp_path) == [file.path]
    assert read(file.path) == [({"number": 9}, b"nine"), RECORDS[1], RECORDS[3], ({"number": 4}, b"four")]
    assert sorted(tmp_path.iterdir()) == [file.path]


def test_attempts_and_drivers_come_in_order(tmp_path: Path) -> None:
    names = [
        file_module.bank_file(tmp_path, attempt, driver) for attempt in (2, 9, 10, 1000) for driver in (0, 3, 100000)
    ]
    for path in reversed(names):
        path.touch()
    (tmp_path / "notes.txt").touch()
    assert bank_files(tmp_path) == names
    assert bank_files(tmp_path / "none") == []


# Failures


def test_a_full_disk_is_logged_once_and_keeps_written_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = writer(tmp_path / "some.bank")
    write(file, RECORDS[1])
    full = True
    fsync = os.fsync

    def no_space(descriptor: int) -> None:
        if full:
            os.write(descriptor, b"torn")
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(file_module.os, "fsync", no_space)
    with caplog.at_level(logging.WARNING):
        for record in RECORDS[2:]:
            write(file, record)
        file.compact(lambda entries: [], [], [])
        assert file.wait(20)
    assert [record.getMessage() for record in caplog.records] == [
        f"{file.path} cannot be written ([Errno 28] No space left on device): the run continues, but after a "
        "restart it would repeat the generation from now on"
    ]
    assert read(file.path)[:1] == [RECORDS[1]]
    assert sorted(tmp_path.iterdir()) == [file.path]  # no temporary file of the compaction
    full = False
    file.compact(lambda entries: [entries[0]], [], [])
    write(file, RECORDS[3])
    assert read(file.path) == [RECORDS[1], RECORDS[3]]
    assert not scan(file.path)[1]


def test_a_file_at_its_limit_makes_room_first(tmp_path: Path) -> None:
    size = len(encode(*RECORDS[3]))

    def newest_first(entries: Sequence[Entry], room: int) -> list[Entry]:
        return list(entries[-(room // size) :]) if room // size else []

    file = writer(tmp_path / "some.bank", limit=3 * size, within=newest_first)
    for number in range(10):
        write(file, ({"number": number}, RECORDS[3][1]))
        assert file.path.stat().st_size <= 3 * size
    assert [head["number"] for head, _ in read(file.path)] == [7, 8, 9]


def test_a_file_that_cannot_make_room_stays_unchanged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    size = len(encode(*RECORDS[3]))
    file = writer(tmp_path / "some.bank", limit=2 * size)
    with caplog.at_level(logging.WARNING):
        for number in range(5):
            write(file, ({"number": number}, RECORDS[3][1]))
    assert [head["number"] for head, _ in read(file.path)] == [0, 1]
    assert len(caplog.records) == 1
    assert "resume.bank_gib is used up" in caplog.text
