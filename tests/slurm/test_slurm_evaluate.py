"""mrl evaluate --cluster: a job of two replicas, which is preempted, comes back and goes on where it was."""

from __future__ import annotations

import json

import pytest
from json_files import read_json
from login import Login
from records import STEPS, finish, hold, preempt, wait_until_held

from megatron_rl.contract.paths import RunDir

ROUND = 32
"""Problems that two replicas answer at the same time, each twice the demo's 256 rows with 32 answers to a problem."""


@pytest.mark.slow
def test_preempted_evaluation_resumes(login: Login, undisturbed: RunDir) -> None:
    hold(login, {"attempt": 1, "where": "evaluate", "step": ROUND})
    asked = (
        undisturbed.root,
        "--cluster",
        "real",
        "--env-args",
        "evaluation_problems=80",
        "--set",
        "trained",
        "--replicas",
        2,
    )
    said = json.loads(login.call("mrl", "evaluate", *asked, "--json").stdout)
    login.jobs.append(said["job_id"])
    job = login.adopt(said["run_dir"], said["job_id"])
    wait_until_held(job, 1, 0)
    preempt(login, job)
    finish(job)
    assert job.ends() == [("drained", "preempted"), ("finished", None)]
    left = next(line for line in job.ledger() if line["event"] == "end")
    assert left["step"] == ROUND
    result = read_json(job.dir.evaluation)
    assert result["settings"]["checkpoint"]["path"] == str(undisturbed.checkpoint(STEPS))
    assert (result["sets"]["trained"]["problems"], result["sets"]["trained"]["answers"]) == (80, 80 * 32)
    said = login.call("mrl", "status", job.dir.root).stdout
    assert ": finished" in said and "result     trained: greedy " in said and "mrl resume" not in said
