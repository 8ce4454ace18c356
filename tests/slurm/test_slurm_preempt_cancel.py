"""A run that has saved in time comes back by itself even where preemption cancels jobs."""

from __future__ import annotations

import pytest
from login import Login
from records import preempt

DEMO = ("demo", "--cluster", "stub", "job.nodes=2", "job.gpus_per_node=1")


@pytest.mark.slow
@pytest.mark.parametrize("grace", ["20", "0"])
def test_run_preempted_by_cancellation_resumes(login: Login, grace: str) -> None:
    """Before 24.05, where the script requeues itself: in the grace time, or in KillWait."""
    login.profiles["stub"]["sbatch"] = ["--nodelist=node[09-10]"]
    partition = ("scontrol", "update", "PartitionName=low")
    try:
        login.lab.run(*partition, "PreemptMode=CANCEL", f"GraceTime={grace}")
        run = login.submit(*DEMO, stub={"steps": 1000, "seconds": 0.2})
        run.wait_for_step(2)
        urgent = preempt(login, run)
        run.wait("PENDING")
        assert run.ends() == [("drained", "preempted")]
        login.lab.run("scancel", urgent)
        run.wait_for_step(len(run.metrics()) + 2)
    finally:
        login.lab.run(*partition, "PreemptMode=REQUEUE", "GraceTime=20")
