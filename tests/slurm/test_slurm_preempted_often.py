"""A run that is preempted again and again comes back each time, whatever Slurm counts."""

from __future__ import annotations

import pytest
from lab import wait_until
from login import SECONDS, Login
from records import kill_rank, preempt, wait_for_ends
from together import Together

DEMO = ("demo", "--cluster", "stub", "job.nodes=2", "job.gpus_per_node=1", "job.backoff_s=1")
NO_SIGNAL = {"SlurmctldParameters=preempt_send_user_signal\n": ""}

together = Together()


@together
def test_preempted_run_resumes_and_finishes_once(login: Login) -> None:
    login.profiles["stub"]["sbatch"] = ["--nodelist=node[07-08]"]
    is_preempted_and_finishes(login, 1)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, NO_SIGNAL], ids=["with the user's signal", "without"])
def test_run_preempted_8_times_resumes_each_time(login: Login, changes: dict[str, str]) -> None:
    login.profiles["stub"]["sbatch"] = ["--nodelist=node[07-08]"]
    with login.lab.configured(changes):
        is_preempted_and_finishes(login, 8)


def is_preempted_and_finishes(login: Login, times: int) -> None:
    run = login.submit(*DEMO, stub={"steps": 100_000, "until": "enough"})
    for number in range(1, times + 1):
        run.wait_for_step(len(run.metrics()) + 2)
        urgent = preempt(login, run)
        wait_for_ends(run, number)
        run.wait("PENDING")
        login.lab.run("scancel", urgent)
    run.wait_for_step(len(run.metrics()) + 2)
    assert run.field("BatchFlag") == "1", "Slurm holds a job once this exceeds MaxBatchRequeue"
    wait_until("a rank is killed", lambda: kill_rank(run, 1), SECONDS)
    wait_for_ends(run, times + 1)
    run.wait_for_step(len(run.metrics()) + 2)
    (run.dir.root / "enough").touch()
    assert run.wait() == "COMPLETED"
    assert run.ends() == [("drained", "preempted")] * times + [("crashed", None), ("finished", None)]
    assert run.field("Restarts") == str(times + 1), "the job must not start again after it has finished"
    assert "finished" in login.call("mrl", "status", run.dir.root).stdout


@together
def test_preempted_run_that_is_cancelled_stays_cancelled(login: Login) -> None:
    login.profiles["stub"]["sbatch"] = ["--nodelist=node[05-06]"]
    run = login.submit(*DEMO, stub={"steps": 100_000})
    run.wait_for_step(2)
    urgent = preempt(login, run)
    run.wait("PENDING")
    login.lab.run("scancel", urgent)
    run.wait_for_step(len(run.metrics()) + 2)
    login.call("mrl", "cancel", "--drain", run.dir.root)
    assert run.wait() == "COMPLETED"
    assert run.ends() == [("drained", "preempted"), ("stopped", "cancelled")]
    assert run.field("Restarts") == "1"
