"""A job that gets a drain in one of Slurm's own ways, or does not notice it, comes back by itself."""

from __future__ import annotations

import pytest
from lab import wait_until
from login import SECONDS, Login, Run
from together import Together

DEMO = ("demo", "--cluster", "stub", "job.nodes=2", "job.gpus_per_node=1")
LONG = {"steps": 10_000, "seconds": 0.1}

together = Together()


def comes_back(run: Run) -> None:
    """Once, and leaves no gap."""
    wait_until("the second attempt has begun", lambda: run.dir.last_attempt() == 2, SECONDS)
    run.wait_for_step(len(run.metrics()) + 2)
    assert run.metrics()[-1]["attempt"] == 2
    assert run.field("Restarts") == "1"
    assert run.has_each_step_once()


@pytest.mark.slow
@together
def test_job_requeued_with_scontrol_restarts_once(login: Login) -> None:
    run = login.submit(*DEMO, stub=LONG)
    run.wait_for_step(2)
    login.lab.run("scontrol", "requeue", run.job)
    comes_back(run)
    assert run.ends() == [("drained", "requeue")]


@pytest.mark.slow
@together
def test_ranks_that_ignore_a_drain_lose_the_work_since_the_last_save_and_the_run_continues(login: Login) -> None:
    run = login.submit(*DEMO, stub={**LONG, "deaf": True})
    run.wait_for_step(2)
    login.lab.run("scontrol", "requeue", run.job)
    comes_back(run)
    assert run.ends() in ([("drained", "requeue")], [("lost", "requeue")])  # Slurm may end the script with the ranks
    assert not run.dir.attempt(1).outcome.exists()
