"""key=a,b,c: a job and a run directory for each value."""

from __future__ import annotations

import json

import pytest
from login import Login

SWEEP = ("demo", "--cluster", "stub", "training.seed=1,2,3", "--json")


@pytest.mark.slow
def test_sweep_submits_a_run_for_each_value_and_limits_simultaneous_jobs(login: Login) -> None:
    stub = json.dumps({"steps": 20, "seconds": 0.1})
    said = json.loads(login.call("mrl-submit", *SWEEP, "--max-running", "2", MRL_STUB=stub).stdout)["runs"]
    login.jobs += [one["job_id"] for one in said]
    runs = [login.adopt(one["run_dir"], one["job_id"]) for one in said]
    assert len({run.dir.root for run in runs}) == 3
    assert runs[2].field("Reason") == "Dependency"
    for run in runs[:2]:
        run.wait("RUNNING", "COMPLETED")
    for seed, run in enumerate(runs, start=1):
        assert f"seed={seed}" in run.dir.root.name
        assert run.wait("COMPLETED")
        assert f"seed: {seed}\n" in run.dir.resolved.read_text()
    assert runs[2].field("StartTime") >= runs[0].field("EndTime")
