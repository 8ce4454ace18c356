"""Ranks that never leave cost the work since the last save, not the run."""

from __future__ import annotations

import pytest
from lab import wait_until
from login import Login

STUB = ("demo", "--cluster", "stub", "job.nodes=2", "job.gpus_per_node=1")


@pytest.mark.slow
def test_at_the_time_limit_the_job_comes_back_without_their_save(login: Login) -> None:
    login.profiles["stub"]["signal_s"] = 30
    run = login.submit(*STUB, "job.time_limit=0:01:00", stub={"steps": 10_000, "seconds": 0.2, "deaf": True})
    wait_until("the second attempt has begun", lambda: run.dir.last_attempt() == 2, 200)
    assert run.ends() == [("drained", "time limit")]
    assert run.field("Restarts") == "1"
    run.wait_for_step(len(run.metrics()) + 2)
