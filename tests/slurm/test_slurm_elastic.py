"""A run of `job.nodes: 2-4` starts again with what there is, and one with a spare node outlives a dead one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from json_files import read_json
from lab import Cluster, wait_until
from login import SECONDS, Login, Run
from together import Together

LONG = {"steps": 400}

together = Together()


@contextmanager
def out_of_service(lab: Cluster, *nodes: str) -> Iterator[None]:
    names = ",".join(nodes)
    lab.run("scontrol", "update", f"NodeName={names}", "State=DRAIN", "Reason=test")
    try:
        yield
    finally:
        lab.run("scontrol", "update", f"NodeName={names}", "State=RESUME")


@pytest.mark.slow
@together
def test_run_on_a_range_of_nodes_restarts_on_the_available_ones(login: Login) -> None:
    login.confine(1, 4)
    login.lab.wait_until_idle(1, 4)
    run = login.submit("demo", "--cluster", "stub", "job.nodes=2-4", "job.gpus_per_node=2", stub=LONG)
    run.wait_for_step(3)
    assert tasks(run, 1) == {"8"}
    with out_of_service(login.lab, "node02"):
        assert "then it is requeued" in login.call("mrl", "requeue", run.dir.root).stdout
        wait_until("it starts again", lambda: len(run.seen(2)) == 6, SECONDS)
        run.wait_for_step(len(run.metrics()) + 1)
        status = json.loads(login.call("mrl", "status", run.dir.root, "--json").stdout)
        assert (status["attempt"], status["job"]["restarts"], status["job"]["id"]) == (2, 1, run.job)
        login.call("mrl", "cancel", "--drain", run.dir.root)
        run.wait("COMPLETED")
    assert run.ends() == [("drained", "requeue"), ("stopped", "cancelled")]
    assert tasks(run, 2) == {"6"}
    assert hosts(run, 2) == {"node01", "node03", "node04"}
    assert read_json(run.dir.attempt(2).nodes)["working"] == 3
    assert run.has_each_step_once()


@pytest.mark.slow
@together
def test_run_on_a_range_of_nodes_starts_without_a_bad_node(login: Login) -> None:
    sick = login.program("python", 'case "$(hostname) $*" in node06*host.health*) exit 1 ;; esac\nexec python3 "$@"')
    login.confine(5, 8)
    login.profiles["stub"] |= {"health_check": True, "host_python": str(sick)}
    login.lab.wait_until_idle(5, 8)
    run = login.submit("demo", "--cluster", "stub", "job.nodes=2-4", "job.gpus_per_node=1")
    assert run.wait() == "COMPLETED", run.log()
    assert run.ends() == [("finished", None)]
    assert hosts(run, 1) == {"node05", "node07", "node08"}


@pytest.mark.slow  # Slurm takes its time to find out
@pytest.mark.parametrize(("sizes", "then"), [(["job.nodes=2", "job.spare_nodes=1"], 2), (["job.nodes=2-3"], 2)])
def test_run_restarts_on_the_surviving_nodes_of_its_allocation(login: Login, sizes: list[str], then: int) -> None:
    login.confine(1, 4)
    login.profiles["stub"]["health_check"] = True
    login.lab.wait_until_idle(1, 4)
    run = login.submit("demo", "--cluster", "stub", *sizes, "job.gpus_per_node=1", stub={"steps": 1000, "seconds": 0.1})
    run.wait_for_step(3)
    login.lab.kill_node("node02")
    try:
        wait_until("it goes on", lambda: len(run.seen(2)) == then, SECONDS)
        assert run.field("Restarts") == "0"
        assert hosts(run, 2) == {"node01", "node03"}
        assert run.ends() == [("lost", "node failure")]
        login.call("mrl", "cancel", "--drain", run.dir.root)
        run.wait("COMPLETED")
    finally:
        login.lab.restart_node("node02")
    assert run.ends()[1:] == [("stopped", "cancelled")]
    assert run.has_each_step_once()


def tasks(run: Run, attempt: int) -> set[str]:
    return {rank["environment"]["SLURM_NTASKS"] for rank in run.seen(attempt).values()}


def hosts(run: Run, attempt: int) -> set[str]:
    return {rank["host"] for rank in run.seen(attempt).values()}
