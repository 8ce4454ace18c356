"""key=a,b,c: a job and a run directory for each value."""

from __future__ import annotations

import json

from login import Login

SWEEP = ("demo", "--cluster", "stub", "training.seed=1,2,3", "--json")


def test_a_sweep_is_one_run_for_each_value(login: Login) -> None:
    said = json.loads(login.call("mrl-submit", *SWEEP).stdout)["runs"]
    runs = [login.adopt(one["run_dir"], one["job_id"]) for one in said]
    assert len({run.dir.root for run in runs}) == 3
    for seed, run in enumerate(runs, start=1):
        assert f"seed={seed}" in run.dir.root.name
        assert run.wait() == "COMPLETED"
        assert f"seed: {seed}\n" in run.dir.resolved.read_text()


def test_no_more_jobs_of_a_sweep_run_at_once_than_asked_for(login: Login) -> None:
    stub = json.dumps({"steps": 1000})
    said = json.loads(login.call("mrl-submit", *SWEEP, "--max-running", "2", MRL_STUB=stub).stdout)["runs"]
    runs = [login.adopt(one["run_dir"], one["job_id"]) for one in said]
    for run in runs[:2]:
        run.wait("RUNNING")
    assert runs[2].field("Reason") == "Dependency"
    login.lab.run("scancel", runs[0].job)
    runs[2].wait("RUNNING")
    assert runs[1].state() == "RUNNING"
