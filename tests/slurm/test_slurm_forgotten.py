"""The state of a run once the controller has forgotten its job, with and without an accounting database."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab import Cluster, LabError, wait_until
from login import SECONDS, Login, Run

STUB = ("demo", "--cluster", "stub", "job.nodes=1", "job.gpus_per_node=1")


@pytest.fixture(params=["accounting_lab", "forgetful_lab"])
def login(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Login]:
    with Login(request.getfixturevalue(request.param), tmp_path / "home", tmp_path / "share") as user:
        yield user


def status(login: Login, run: Path) -> dict[str, Any]:
    return dict(json.loads(login.call("mrl", "status", run, "--json").stdout))


def accounted(lab: Cluster, run: Run) -> list[str]:
    """The job's states in the accounts, one a start, once it has ended there too: the controller notifies slurmdbd
    later than all others."""

    def rows() -> list[str]:
        return lab.run("sacct", "-X", "-D", "-n", "-P", "--format=State", f"--jobs={run.job}").splitlines()

    wait_until(f"job {run.job} has ended in the accounts", lambda: {"RUNNING", "PENDING"}.isdisjoint(rows()), SECONDS)
    return rows()


@pytest.mark.slow
def test_state_of_a_forgotten_job_comes_from_the_accounts_or_is_lost(login: Login) -> None:
    accounts = login.lab.accounting
    requeued = login.submit(*STUB, stub={"steps": 40, "seconds": 0.1})
    killed = login.submit(*STUB, stub={"steps": 1000})
    for run in (requeued, killed):
        run.wait_for_step(2)
    login.lab.run("scancel", "--batch", "--signal=KILL", killed.job)
    login.call("mrl", "requeue", requeued.dir.root)
    assert killed.wait("CANCELLED", "FAILED", "NODE_FAIL", "COMPLETED") != "COMPLETED"
    login.profiles["stub"]["sbatch"] = ["--hold"]
    cancelled = login.submit(*STUB)
    login.lab.run("scancel", cancelled.job)
    cancelled.wait("CANCELLED")

    requeued.wait("COMPLETED")

    said = login.call("mrl", "status", killed.dir.root).stdout
    assert f"the script of job {killed.job} was killed by SIGKILL" in said
    assert "next       mrl resume" in said

    runs = {"requeued": requeued, "killed": killed, "cancelled": cancelled}
    before = {name: status(login, run.dir.root)["state"] for name, run in runs.items()}
    assert before["requeued"] == "finished"
    assert before["killed"] in ("failed", "lost", "cancelled")
    assert before["cancelled"] == "cancelled"

    if accounts:
        rows = {name: accounted(login.lab, run) for name, run in runs.items()}
        assert rows["requeued"] == ["REQUEUED", "COMPLETED"], "one a start"
    login.lab.forget_jobs()
    with pytest.raises(LabError):
        requeued.state()
    after = {name: status(login, run.dir.root) for name, run in runs.items()}
    assert after["requeued"]["state"] == "finished"
    if accounts:
        assert after["cancelled"]["state"] == "cancelled"
        assert after["killed"]["state"] == before["killed"]
    else:
        assert after["cancelled"]["state"] == after["killed"]["state"] == "lost"
        assert "is gone" in after["cancelled"]["reason"]
