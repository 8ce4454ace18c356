"""A run that crashes comes back by itself as long as it gets on, elsewhere where a node is suspect; else it is held."""

from __future__ import annotations

from json_files import read_json
from lab import wait_until
from login import SECONDS, Login
from together import Together

DEMO = ("demo", "--cluster", "stub", "job.nodes=2", "job.gpus_per_node=1")

together = Together()


@together
def test_a_crash_after_a_new_checkpoint_comes_back_later_and_the_second_time_elsewhere(login: Login) -> None:
    login.confine(1, 3)
    run = login.submit(*DEMO, "job.backoff_s=10", stub={"steps": 40, "checkpoint": 5, "crash_at": [10, 20]})
    wait_until("it has crashed", run.ends, SECONDS)
    wait_until("it is back in the queue", lambda: run.state() == "PENDING", SECONDS)
    said = login.call("mrl", "status", run.dir.root).stdout
    assert "requeued" in said
    assert "crashed at step 10 (training): rank 1 on node" in said
    assert "1st of at most 3 without a new checkpoint" in said

    assert run.wait() == "COMPLETED", run.log()
    assert run.ends() == [("crashed", None), ("crashed", None), ("finished", None)]
    assert run.field("Restarts") == "2"
    starts = [line for line in run.ledger() if line["event"] == "start"]
    ends = [line for line in run.ledger() if line["event"] == "end"]
    assert [end["crashes"] for end in ends[:2]] == [1, 1], "there was a new checkpoint between them"
    for before, after in zip(ends, starts[1:], strict=False):
        assert after["at"] >= before["not_before"] - 1.5  # Slurm knows whole seconds only
    first, second, third = ({rank["host"] for rank in run.seen(attempt).values()} for attempt in (1, 2, 3))
    assert first == second
    assert ends[1]["excluded"] == [ends[0]["node"]]
    assert ends[0]["node"] in first - third
    assert run.avoided() == {ends[0]["node"], *(f"node{number:02d}" for number in range(4, 11))}


@together
def test_the_same_crash_on_another_node_is_held_and_mrl_resume_goes_on(login: Login) -> None:
    login.confine(4, 6)
    run = login.submit(*DEMO, "job.backoff_s=1", stub={"steps": 1000, "crash_at": 3})
    assert run.wait() == "FAILED"
    assert run.ends() == [("crashed", None)] * 3
    second = run.ledger()[3]
    assert second["excluded"] == [second["node"]], "the second time on the same node"
    end = run.ledger()[-1]
    assert (end["rank"], end["error"], end["then"]) == (1, "RuntimeError: boom", "held")
    said = login.call("mrl", "status", run.dir.root).stdout
    assert "failed" in said
    assert "RuntimeError: boom; held: the same error at the same step twice" in said
    assert "mrl resume" in said
    login.lab.run("scontrol", "requeue", run.job)  # of somebody who does not know
    wait_until("it has started again", lambda: run.field("Restarts") == "3" and run.state() == "FAILED", SECONDS)
    assert run.dir.last_attempt() == 3
    login.call("mrl", "resume", run.dir.root, MRL_STUB="{}")
    again = login.adopt(run.dir.root)
    login.jobs.append(again.job)
    assert again.wait() == "COMPLETED"


@together
def test_a_job_that_cannot_be_requeued_has_a_successor(login: Login) -> None:
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
