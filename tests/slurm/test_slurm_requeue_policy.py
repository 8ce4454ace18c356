"""A run that crashes comes back by itself as long as it gets on, elsewhere where a node is suspect; else it is held."""

from __future__ import annotations

from typing import Any

import pytest
from json_files import read_json
from lab import wait_until
from login import SECONDS, Login, Run
from together import Together

DEMO = ("demo", "--cluster", "stub", "job.nodes=2", "job.gpus_per_node=1")

together = Together()


def ends_of(run: Run) -> list[dict[str, Any]]:
    return [line for line in run.ledger() if line["event"] == "end"]


def until_second_attempt(login: Login, run: Run, taken: str) -> None:
    """Cancel the job `taken`, which leaves the run's second attempt no other nodes than those of the first."""
    wait_until("the second attempt", lambda: run.dir.last_attempt() == 2, SECONDS)
    login.lab.run("scancel", taken)


@together
@pytest.mark.slow  # a minute; the policy has unit tests
def test_run_that_crashes_after_a_new_checkpoint_restarts_later_and_then_on_other_nodes(login: Login) -> None:
    login.confine(1, 3)
    taken = login.take("node03")
    run = login.submit(*DEMO, "job.backoff_s=10", stub={"steps": 40, "checkpoint": 5, "crash_at": [10, 20]})
    wait_until("it has crashed", run.ends, SECONDS)
    wait_until("it is back in the queue", lambda: run.state() == "PENDING", SECONDS)
    said = login.call("mrl", "status", run.dir.root).stdout
    assert "requeued" in said
    assert "crashed at step 10 (training): rank 1 on node" in said
    assert "1st of at most 3 without a new checkpoint" in said

    until_second_attempt(login, run, taken)
    assert run.wait() == "COMPLETED", run.log()
    assert run.field("Restarts") == str(run.dir.last_attempt() - 1)
    starts = {line["attempt"]: line for line in run.ledger() if line["event"] == "start"}
    ends = ends_of(run)
    assert [end["outcome"] for end in ends] == ["crashed", "crashed", "finished"], run.log()
    assert [end["crashes"] for end in ends[:2]] == [1, 1], "there was a new checkpoint between them"
    for before in ends[:2]:
        after = starts[before["attempt"] + 1]
        assert after["at"] >= before["not_before"] - 1.5  # Slurm knows whole seconds only
    first, second, third = ({rank["host"] for rank in run.seen(end["attempt"]).values()} for end in ends)
    assert first == second == {"node01", "node02"}
    assert third == {"node01", "node02", "node03"} - {ends[0]["node"]}
    assert ends[1]["excluded"] == [ends[0]["node"]]
    assert run.avoided() == {ends[0]["node"], *(f"node{number:02d}" for number in range(4, 11))}


@pytest.mark.slow
@together
def test_job_that_cannot_be_requeued_submits_a_successor(login: Login) -> None:
    login.confine(7, 9)
    login.profiles["stub"]["sbatch"].append("--no-requeue")
    run = login.submit(*DEMO, stub={"steps": 30, "seconds": 0.2})
    run.wait_for_step(2)
    namesake = ("--job-name=" + run.field("JobName"), "--nodelist=node10", "--output=/dev/null", "--wrap=sleep 1000")
    login.jobs.append(login.lab.run("sbatch", "--parsable", *namesake).strip())  # of a sweep into another directory
    login.lab.run("scancel", "--signal=USR1", "--batch", run.job)
    assert run.wait() == "FAILED"
    assert run.ends()[0] == ("drained", "signal")
    owner = read_json(run.dir.job)
    assert (owner["succeeds"], owner["job_id"] != run.job) == (run.job, True)
    successor = login.adopt(run.dir.root)
    login.jobs.append(successor.job)
    assert successor.wait() == "COMPLETED", run.log()
    assert [line["step"] for line in run.metrics()] == list(range(1, 31))
    assert [line["job_id"] for line in run.ledger() if line["event"] == "start"] == [run.job, successor.job]
    assert "finished" in login.call("mrl", "status", run.job).stdout
