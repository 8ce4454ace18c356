"""Replicas beside the ranks of a co-located run, on the same nodes: the stub rank stands for the front of a vLLM."""

from __future__ import annotations

import signal

import pytest
from lab import wait_until
from login import SECONDS, Login, Run
from records import kill_rank, preempt, wait_for_ends

LIMIT_S = 200.0
SHAPE = ("job.nodes=2", "job.spare_nodes=1", "job.gpus_per_node=2", "placement.inference.tp=1")
VLLM = ("inference.engine=vllm", "model.num_attention_heads=2", "model.num_query_groups=1")


def submit(login: Login) -> Run:
    asked = (*SHAPE, *VLLM, f"inference.vllm.python={login.python_with_vllm()}")
    run = login.submit("demo", "--cluster", "stub", *asked, stub={"steps": 4000, "seconds": 0.1})
    wait_for_all(run, 1)
    run.wait_for_step(3, LIMIT_S)
    return run


def wait_for_all(run: Run, attempt: int) -> None:
    wanted = {*(f"infer-{number}.0" for number in range(4)), *(f"train.{rank}" for rank in range(4))}
    wait_until(f"ranks and fronts of attempt {attempt} run", lambda: wanted <= run.seen(attempt).keys(), LIMIT_S)


def hosts(run: Run, attempt: int, *names: str) -> list[str]:
    return [run.seen(attempt)[name]["host"] for name in names]


@pytest.mark.slow
def test_front_that_is_killed_returns_to_its_node_and_a_preempted_run_brings_all_back(login: Login) -> None:
    login.confine(1, 4)
    run = submit(login)
    place = hosts(run, 1, "infer-2.0")
    assert place == hosts(run, 1, "train.2") != hosts(run, 1, "infer-0.0")
    assert kill_rank(run, 0, "infer-2", signal.SIGKILL)
    wait_until("it starts again", lambda: run.seen()["infer-2.0"]["environment"]["MRL_START"] == "1", LIMIT_S)
    assert hosts(run, 1, "infer-2.0") == place
    status = login.call("mrl", "status", run.dir.root).stdout
    assert f"infer-2: starts on {place[0]}" in status and "SIGKILL" in status

    urgent = preempt(login, run)
    wait_for_ends(run, 1)
    login.lab.run("scancel", urgent)
    wait_for_all(run, 2)
    run.wait_for_step(len(run.metrics()) + 3, LIMIT_S)
    login.call("mrl", "cancel", "--drain", run.dir.root)
    run.wait("COMPLETED", limit=LIMIT_S)
    assert run.ends() == [("drained", "preempted"), ("stopped", "cancelled")], run.log()
    assert run.has_each_step_once()
    assert not login.lab.run("squeue", "--noheader", "--steps", "--jobs", run.job).strip()


@pytest.mark.slow  # Slurm takes its time to find out
def test_dead_node_ends_the_attempt_and_the_spare_node_has_ranks_and_fronts_in_the_next(login: Login) -> None:
    login.confine(1, 3)
    login.lab.wait_until_idle(1, 3)
    run = submit(login)
    (lost,) = hosts(run, 1, "infer-3.0")
    login.lab.kill_node(lost)
    try:
        wait_for_all(run, 2)
        ranks = hosts(run, 2, "train.0", "train.1", "train.2", "train.3")
        assert hosts(run, 2, *(f"infer-{number}.0" for number in range(4))) == ranks
        assert lost not in ranks
        assert run.ends() == [("lost", "node failure")]
        login.call("mrl", "cancel", "--drain", run.dir.root)
        run.wait("COMPLETED", limit=SECONDS)
    finally:
        login.lab.restart_node(lost)
