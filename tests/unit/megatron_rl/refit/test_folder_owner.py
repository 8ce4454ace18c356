"""A folder of weights belongs to one run until that has finished."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import write
from megatron_rl.contract.run_records import RunIdentity
from megatron_rl.errors import ConfigurationError
from megatron_rl.refit.folder_owner import OWNER, claim, identity_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "weights").mkdir()
    return tmp_path / "weights"


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[list[RunDir]]:
    found = []
    for name in ("first", "second"):
        run = RunDir(tmp_path / name)
        run.root.mkdir()
        write(run.identity, RunIdentity(name, str(run.root), 1, 0.0))
        found.append(run)
    yield found


def test_a_run_keeps_its_folder_over_its_attempts(folder: Path, runs: list[RunDir]) -> None:
    for _ in range(2):
        os.close(claim(folder, identity_of(runs[0])))


def test_another_run_is_refused_while_the_owner_runs_or_may_come_back(folder: Path, runs: list[RunDir]) -> None:
    lock = claim(folder, identity_of(runs[0]))
    with pytest.raises(ConfigurationError, match=r"belongs to run first .*which is running: name another folder"):
        claim(folder, identity_of(runs[1]))
    os.close(lock)  # it is preempted
    with pytest.raises(ConfigurationError, match=f"belongs to run first .*has not finished.*delete .*{OWNER}"):
        claim(folder, identity_of(runs[1]))


@pytest.mark.parametrize("end", ["finished", "deleted"])
def test_a_folder_passes_on_when_its_owner_has_ended(folder: Path, runs: list[RunDir], end: str) -> None:
    os.close(claim(folder, identity_of(runs[0])))
    if end == "finished":
        runs[0].done.touch()
    else:
        runs[0].identity.unlink()
        runs[0].root.rmdir()
    os.close(claim(folder, identity_of(runs[1])))
    with pytest.raises(ConfigurationError, match="belongs to run second"):
        claim(folder, identity_of(RunDir(folder)))


def test_an_attempt_waits_for_an_earlier_one_of_its_run(folder: Path, runs: list[RunDir]) -> None:
    lock = claim(folder, identity_of(runs[0]))
    with pytest.raises(ConfigurationError, match="in use by an earlier attempt of this run"):
        claim(folder, identity_of(runs[0]), patience=0.2)
    os.close(lock)


def test_a_damaged_owner_file_keeps_the_folder(folder: Path, runs: list[RunDir]) -> None:
    (folder / OWNER).write_text("{")
    with pytest.raises(ConfigurationError, match=f"{OWNER}.*delete it if no run"):
        claim(folder, identity_of(runs[0]))


def test_a_run_without_a_record_is_its_directory(tmp_path: Path) -> None:
    assert identity_of(RunDir(tmp_path)).id == str(tmp_path)
