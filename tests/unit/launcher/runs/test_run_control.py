"""Control of a run: its orders come in a sequence that no drain can undo, and never reach beyond the run's own job."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from fault_injection import Clock
from run_helpers import begin, make_run

from launcher.backends.slurm.jobs import JobState
from launcher.errors import Failed
from launcher.runs.control import cancel, requeue
from launcher.runs.state import RunStatus, read_status
from megatron_rl.contract.attempt_records import Drain
from megatron_rl.contract.records import read, write


@pytest.fixture
def scancel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for Slurm's; keeps the drain file as it was at the call and what it was called with."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "scancel"
    drain = tmp_path / "run/attempts/001/drain.json"
    program.write_text(f'#!/bin/sh\necho "$@" >> {folder}/said\ncp {drain} {folder}/drain.json\nexit 0\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def running(tmp_path: Path, batch: bool = True) -> RunStatus:
    run = make_run(tmp_path / "run", job_id="7", cluster="lab")
    begin(run, 1, job_id="7")
    return read_status(run, JobState("7", "RUNNING", "running", batch=batch))


def test_a_cancelled_job_does_not_come_back_for_an_earlier_cause(tmp_path, scancel):
    status = running(tmp_path)
    write(status.run.attempt(1).drain, Drain("preempted", "Slurm", 1.0, deadline=60.0, end=90.0))
    assert cancel(status, drain=False) == "job 7 is cancelled"
    seen = read(Drain, scancel / "drain.json")
    assert (seen.cause, seen.deadline, seen.end) == ("cancelled", 60.0, 90.0)
    assert (scancel / "said").read_text() == "7\n"


def test_a_job_without_an_attempt_is_simply_cancelled(tmp_path, scancel):
    run = make_run(tmp_path / "run", job_id="7", cluster="lab")
    cancel(read_status(run, JobState("7", "RUNNING", "running")), drain=True)
    assert (scancel / "said").read_text() == "7\n"
    assert not run.attempt(1).drain.exists()


def test_an_allocation_outlives_the_run_that_is_cancelled_in_it(tmp_path, scancel):
    status = running(tmp_path, batch=False)
    assert "allocation, job 7, stays" in cancel(status, drain=False)
    drain = read(Drain, status.run.attempt(1).drain)
    assert (drain.cause, drain.deadline) == ("cancelled", drain.at)
    assert not (scancel / "said").exists()


def test_an_allocation_with_nothing_in_it_is_left_alone(tmp_path, scancel):
    run = make_run(tmp_path / "run", job_id="7", cluster="lab")
    status = read_status(run, JobState("7", "RUNNING", "running", batch=False))
    for command in (lambda: cancel(status, drain=True), lambda: requeue(status, now=True)):
        with pytest.raises(Failed, match="allocation"):
            command()
    assert not (scancel / "said").exists()


@pytest.mark.parametrize("damaged", [True, False])
def test_a_run_that_may_be_going_on_is_left_alone(tmp_path, scancel, damaged):
    run = make_run(tmp_path / "run", job_id="7", cluster="lab")
    if damaged:
        run.attempts_ledger.mkdir()
    status = read_status(run, JobState("7", "RUNNING", "running") if damaged else JobState("7", "", "unknown"))
    for command in (lambda: cancel(status, drain=True), lambda: requeue(status, now=True)):
        with pytest.raises(Failed, match="attempts.jsonl" if damaged else "Slurm does not answer"):
            command()
    assert not (scancel / "said").exists()


@pytest.mark.parametrize("damage", ["ledger", "line", "request"])
def test_what_cannot_be_read_any_more_ends_nothing_that_may_have_to_be_saved(tmp_path, scancel, monkeypatch, damage):
    Clock(monkeypatch)  # nobody waits
    status = running(tmp_path)
    file = status.run.attempt(1).drain if damage == "request" else status.run.attempts_ledger
    if damage == "line":
        with file.open("a") as ledger:
            ledger.write('{"event": "st\n')
    else:
        file.unlink(missing_ok=True)
        file.mkdir()
    orders = [
        lambda: requeue(status, now=False),
        *([lambda: cancel(status, drain=True)] if damage != "request" else []),
    ]
    for order in orders:
        with pytest.raises(Failed, match=file.name):
            order()
    assert not (scancel / "said").exists()
    if damage != "request":  # what is asked for without a save needs neither
        cancel(status, drain=False)
        assert read(Drain, status.run.attempt(1).drain).cause == "cancelled"
        assert (scancel / "said").read_text() == "7\n"


def test_an_attempt_that_may_have_begun_since_slurm_was_asked_is_not_killed_unsaved(tmp_path, scancel):
    status = replace(running(tmp_path), job=JobState("7", "PENDING", "pending"), state="queued")
    assert cancel(status, drain=True) == "job 7 is cancelled; if it runs again already, it saves and leaves"
    assert read(Drain, status.run.attempt(1).drain).cause == "cancelled"
    assert (scancel / "said").read_text() == "--state=PENDING 7\n"
