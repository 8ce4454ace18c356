"""A file system that fails under the bank: the groups that a checkpoint counts on are found or the rank ends, and no
file is deleted whose records were not read."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from bank_helpers import bank_in
from core_helpers import trajectory
from fault_injection import GARBAGE, OLDER, Clock, Fault, FaultyFiles, Operation, faults

from megatron_rl.agent.trajectories import Problem, TrajectoryGroup
from megatron_rl.learn.rollout.bank import file as file_module
from megatron_rl.learn.rollout.bank.bank import Bank
from megatron_rl.learn.rollout.bank.file import READ_PATIENCE_S, bank_file, bank_files, scan

SURPLUS = (4, 5)
"""Ordinals of the groups that the checkpoint counts on."""


def problem(ordinal: int) -> Problem:
    return Problem(str(ordinal), {})


def groups() -> dict[int, TrajectoryGroup]:
    return {each: TrajectoryGroup(each, problem(each), [trajectory([1], [each], 1.0)], {}) for each in SURPLUS}


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look again at once at what is damaged."""
    monkeypatch.setattr(file_module, "LOOK_AGAIN_S", 0.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Bank of an attempt that ended after a checkpoint."""
    bank = bank_in(tmp_path / "bank")
    bank.begin_checkpoint(1, SURPLUS[0], 0, groups().values())()
    bank.close()
    return tmp_path / "bank"


@contextmanager
def failing(folder: Path, fault: Fault | None) -> Iterator[FaultyFiles]:
    with pytest.MonkeyPatch.context() as patch:
        Clock(patch)
        yield FaultyFiles(folder, patch, fault)


def found(folder: Path, attempt: int, **options: Any) -> tuple[Bank, dict[int, TrajectoryGroup]]:
    """Open the bank of an attempt that resumes from the checkpoint, and look for the groups."""
    bank = bank_in(folder, attempt, next_ordinal=SURPLUS[0], **options)
    return bank, bank.scored(SURPLUS, problem, waiting=True)


def resumed(folder: Path, fault: Fault | None) -> tuple[dict[int, TrajectoryGroup], list[Operation]]:
    """Resume, and save a checkpoint after which earlier files are superseded."""
    with failing(folder, fault) as files:
        bank, its = found(folder, 2)
        bank.begin_checkpoint(1, SURPLUS[0], 0)
        bank.end_checkpoint(1)
        bank.close()
        return its, files.operations


def test_no_single_fault_loses_a_group_that_the_checkpoint_counts_on(folder: Path, tmp_path: Path) -> None:
    content = {path.name: path.read_bytes() for path in bank_files(folder)}

    def again(number: int) -> Path:
        (root := tmp_path / str(number)).mkdir()
        for name, data in content.items():
            (root / name).write_bytes(data)
        return root

    _, operations = resumed(again(0), None)
    assert bank_files(tmp_path / "0") == [bank_file(tmp_path / "0", 2, 0)], "the first driver has moved the records"
    tried = [fault for fault in faults(operations, without=OLDER) if fault.kind in ("EIO", GARBAGE)]
    assert {operations[fault.at].kind for fault in tried} >= {"list", "open", "read", "create", "rename", "unlink"}
    for number, fault in enumerate(tried, start=1):
        root = again(number)
        its, _ = resumed(root, fault)
        assert its == groups(), (fault, operations[fault.at])
        assert found(root, 3)[1] == groups(), (fault, operations[fault.at])


@pytest.mark.parametrize("kind", ["EIO", "ESTALE", "EACCES"])
def test_a_bank_that_stays_unreadable_ends_the_rank(folder: Path, kind: str) -> None:
    with (
        failing(folder, Fault(kind, 0, seconds=3 * READ_PATIENCE_S)),
        pytest.raises(OSError, match="cannot be read, and"),
    ):
        found(folder, 2)
    assert found(folder, 3)[1] == groups()


def test_files_whose_records_cannot_be_copied_stay(folder: Path) -> None:
    """The bank reads them at the start, and no longer when the first driver moves what is still needed."""
    bank, its = found(folder, 2)
    with failing(folder, Fault("EIO", 0, seconds=3 * READ_PATIENCE_S)):
        bank.begin_checkpoint(1, SURPLUS[0], 0)
        bank.end_checkpoint(1)
        bank.close()
    assert its == groups()
    assert bank_files(folder)[0] == bank_file(folder, 1, 0)
    assert found(folder, 3)[1] == groups()


def test_a_damaged_group_is_generated_and_written_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (path,) = bank_files(folder)
    (last,) = (entry for entry in scan(path)[0] if entry.head.get("ordinal") == SURPLUS[1])
    content = bytearray(path.read_bytes())
    content[last.body_start] ^= 1
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        bank, its = found(folder, 2)
    assert its == {SURPLUS[0]: groups()[SURPLUS[0]]}
    assert "1 of 2 groups that the checkpoint counts on are not in" in caplog.text
    bank.begin_checkpoint(1, SURPLUS[0], 0, groups().values())()
    assert found(folder, 3)[1] == groups()
