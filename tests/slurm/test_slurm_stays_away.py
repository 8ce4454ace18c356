"""A job that somebody ended does not come back, whatever else was going on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lab import wait_until
from login import SECONDS, Login, Run
from records import resume
from together import Together

STUB = ("demo", "--cluster", "stub", "job.nodes=1", "job.gpus_per_node=2")
together = Together()
LONG = '{"steps": 10000}'
OVER = ("CANCELLED", "COMPLETED", "FAILED")
SOON = 40.0
"""Seconds within which a job that comes back would have."""


def assert_away(run: Run) -> None:
    run.wait(*OVER, limit=SOON)
    assert run.field("Restarts") == "0"
    assert run.dir.last_attempt() == 1
    assert run.ends() in ([], [("stopped", "cancelled")])  # none where Slurm was faster


@pytest.mark.slow
@together
def test_draining_job_cancelled_by_mrl_with_a_save_stays_cancelled(login: Login) -> None:
    run = is_saving(login)
    login.call("mrl", "cancel", "--drain", run.dir.root)
    assert_away(run)


def is_saving(login: Login) -> Run:
    """A run that was asked to leave, and would come back."""
    login.confine(1, 9)
    run = login.submit(*STUB, stub={"steps": 10_000, "save": 3})
    run.wait_for_step(2)
    login.lab.run("scancel", "--signal=USR1", "--batch", run.job)
    wait_until("it was asked to leave", run.dir.attempt(1).drain.exists, SECONDS)
    return run


@pytest.mark.slow
@together
def test_preempted_job_cancelled_while_it_saves_stays_cancelled(login: Login) -> None:
    """Requeue at once: Slurm has not noticed that the grace time is over, nor we that it has begun."""
    node = "--nodelist=node10"
    login.profiles["stub"]["sbatch"] = [node]
    run = login.submit(*STUB, stub={"steps": 10_000, "save": 3})
    run.wait_for_step(2)
    urgent = ("--partition=high", node, "--exclusive", "--output=/dev/null", "--wrap=sleep 1000")
    login.jobs.append(login.lab.run("sbatch", "--parsable", *urgent).strip())
    wait_until("it was asked to leave", run.dir.attempt(1).drain.exists, SECONDS)
    login.lab.run("scancel", run.job)
    assert_away(run)


@pytest.mark.slow
@together
def test_cancelled_job_stays_cancelled_although_slurm_prints_relative_times(login: Login) -> None:
    login.confine(1, 9)
    login.profiles["stub"]["environment"] = {"SLURM_TIME_FORMAT": "relative"}
    run = login.submit(*STUB, stub={"steps": 10_000})
    run.wait_for_step(2)
    login.lab.run("scancel", run.job)
    assert_away(run)


@together
def test_stopped_run_starts_again_only_when_it_is_resumed(login: Login) -> None:
    login.confine(1, 9)
    run = login.submit(*STUB, stub={"steps": 10_000})
    run.wait_for_step(2)
    login.call("mrl", "cancel", "--drain", run.dir.root)
    assert_away(run)
    steps = len(run.metrics())
    status = told(login, run.dir.root)
    assert (status["state"], status["reason"]) == ("stopped", f"saved after step {steps} (cancelled)")
    assert "already ended" in login.call("mrl", "cancel", run.dir.root).stdout

    login.lab.run("scontrol", "requeue", run.job)  # of somebody who does not know
    wait_until("it has started again", lambda: run.field("Restarts") == "1" and run.state() in OVER, SECONDS)
    assert run.dir.last_attempt() == 1
    assert run.state() == "COMPLETED"

    again = resume(login, run, MRL_STUB=LONG)
    again.wait_for_step(steps + 2)
    assert again.has_each_step_once()
    assert told(login, run.job)["attempt"] == 2, "an old job id still names the run"


def told(login: Login, run: str | Path) -> dict[str, Any]:
    return dict(json.loads(login.call("mrl", "status", run, "--json").stdout))


@pytest.mark.slow
@together
def test_job_cancelled_during_the_health_check_stays_cancelled(login: Login) -> None:
    login.confine(1, 9)
    slow = login.program("python", 'case "$*" in *host.health*) sleep 1000 ;; esac\nexec python3 "$@"')
    login.profiles["stub"] |= {"health_check": True, "host_python": str(slow)}
    run = login.submit(*STUB)
    wait_until("the health check begins", lambda: list(run.dir.root.glob("logs/*/health.*")), SECONDS)
    login.lab.run("scancel", run.job)
    assert_away(run)
