"""What a run is told: in an order that no drain under way can undo, and never beyond the run's own job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from run_helpers import begin, make_run

from launcher.backends.slurm.jobs import JobState
from launcher.runs.control import Failed
from launcher.runs.control import cancel
from launcher.runs.control import requeue
from launcher.runs.state import Standing
from launcher.runs.state import look
from megatron_rl.run_dir import read_json
from megatron_rl.run_dir import write_json


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


def running(tmp_path: Path, batch: bool = True) -> Standing:
    run = make_run(tmp_path / "run", job_id="7", cluster="lab")
    begin(run, 1, job_id="7")
    return look(run, JobState("7", "RUNNING", "running", batch=batch))


def test_a_cancelled_job_does_not_come_back_for_an_earlier_cause(tmp_path, scancel):
    standing = running(tmp_path)
    write_json(standing.run.attempt(1).drain, {"cause": "preempted", "by": "Slurm", "at": 1.0, "deadline": 60.0})
    assert cancel(standing, drain=False) == "job 7 is cancelled"
    seen = read_json(scancel / "drain.json")
    assert (seen["cause"], seen["deadline"]) == ("cancelled", 60.0)
    assert (scancel / "said").read_text() == "7\n"


def test_a_job_without_an_attempt_is_simply_cancelled(tmp_path, scancel):
    run = make_run(tmp_path / "run", job_id="7", cluster="lab")
    cancel(look(run, JobState("7", "RUNNING", "running")), drain=True)
    assert (scancel / "said").read_text() == "7\n"
    assert not run.attempt(1).drain.exists()


def test_an_allocation_outlives_the_run_that_is_cancelled_in_it(tmp_path, scancel):
    standing = running(tmp_path, batch=False)
    assert "allocation, job 7, stays" in cancel(standing, drain=False)
    asked = read_json(standing.run.attempt(1).drain)
    assert (asked["cause"], asked["deadline"]) == ("cancelled", asked["at"])
    assert not (scancel / "said").exists()


def test_an_allocation_with_nothing_in_it_is_left_alone(tmp_path, scancel):
    run = make_run(tmp_path / "run", job_id="7", cluster="lab")
    standing = look(run, JobState("7", "RUNNING", "running", batch=False))
    for order in (lambda: cancel(standing, drain=True), lambda: requeue(standing, now=True)):
        with pytest.raises(Failed, match="allocation"):
            order()
    assert not (scancel / "said").exists()
