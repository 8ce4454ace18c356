"""A job that is told to leave saves, leaves, and comes back where it was: preemption, time limit, requeue."""

from __future__ import annotations

import time

import pytest
from lab import wait_until
from login import SECONDS, Login, Run

from launcher.host.record.goodput import read_usage
from megatron_rl.run_dir import read_json

DEMO = ("demo", "--cluster", "stub", "job.nodes=2", "job.gpus_per_node=1")


def assert_no_gap(run: Run) -> None:
    assert [line["step"] for line in run.metrics()] == list(range(1, len(run.metrics()) + 1))


def test_a_preempted_run_goes_on_where_it_was(login: Login) -> None:
    login.profiles["stub"]["sbatch"] = ["--nodelist=node[09-10]"]
    run = login.submit(*DEMO, stub={"steps": 60, "seconds": 0.5})
    run.wait_for_step(2)
    options = ("--partition=high", "--nodelist=node[09-10]", "--exclusive", "--output=/dev/null")
    urgent = login.lab.run("sbatch", "--parsable", *options, "--wrap=sleep 1000").strip()
    login.jobs.append(urgent)
    run.wait("PENDING")
    assert run.ends() == [("drained", "preempted")]
    assert_no_gap(run)
    login.lab.run("scancel", urgent)
    steps = len(run.metrics())
    run.wait_for_step(steps + 2)
    assert run.metrics()[-1]["attempt"] == 2
    assert_no_gap(run)
    assert run.field("Restarts") == "1"
    first, second = read_usage(run.dir, time.time(), running=True).attempts
    assert (first.gpus, second.gpus) == (2, 2)
    assert second.seconds["queue"] > 0 < first.seconds["start-up"]
    assert first.start < read_json(run.dir.attempt(1).marks)["ready"] < first.end


@pytest.mark.slow
def test_a_run_comes_back_after_its_time_limit(login: Login) -> None:
    login.profiles["stub"]["signal_s"] = 30
    run = login.submit(*DEMO, "job.time_limit=0:01:00", stub={"steps": 1000, "seconds": 0.5})
    wait_until("the second attempt has begun", lambda: run.dir.last_attempt() == 2, SECONDS)
    assert run.ends() == [("drained", "time limit")]
    run.wait_for_step(len(run.metrics()) + 1)
    assert_no_gap(run)


@pytest.mark.slow
def test_a_run_whose_node_dies_goes_on_elsewhere(login: Login) -> None:
    run = login.submit(*DEMO, stub={"steps": 10_000, "seconds": 0.2})
    run.wait_for_step(2)
    victim = run.seen()["train.1"]["host"]
    login.lab.kill_node(victim)
    try:
        wait_until("the second attempt has begun", lambda: run.dir.last_attempt() == 2, SECONDS)
        run.wait_for_step(len(run.metrics()) + 2)
    finally:
        login.lab.restart_node(victim)
    assert run.ends()[0] == ("lost", "node failure")
    end = next(line for line in run.ledger() if line["event"] == "end")
    assert end["excluded"] == [victim], end
    assert victim not in {rank["host"] for rank in run.seen(2).values()}
    assert_no_gap(run)


def test_a_job_cancelled_during_the_health_check_stays_cancelled(login: Login) -> None:
    slow = login.home / "slow-python"  # keeps the health check busy
    slow.write_text('#!/bin/sh\ncase "$*" in *host.health*) sleep 1000 ;; esac\nexec python3 "$@"\n')
    slow.chmod(0o755)
    login.profiles["stub"] |= {"health_check": True, "host_python": str(slow)}
    run = login.submit(*DEMO)
    wait_until("the health check begins", lambda: list(run.dir.root.glob("logs/*/health.*")), SECONDS)
    login.lab.run("scancel", run.job)
    assert run.wait() == "CANCELLED"
    assert run.ends() in ([], [("stopped", "cancelled")])
    assert run.field("Restarts") == "0"


def test_a_job_requeued_with_scontrol_comes_back_once(login: Login) -> None:
    run = login.submit(*DEMO, stub={"steps": 1000, "seconds": 0.1})
    run.wait_for_step(2)
    login.lab.run("scontrol", "requeue", run.job)
    wait_until("the second attempt has begun", lambda: run.dir.last_attempt() == 2, SECONDS)
    run.wait_for_step(len(run.metrics()) + 2)
    assert run.ends() == [("drained", "requeue")]
    assert run.field("Restarts") == "1"
    assert_no_gap(run)
