"""A command ends only jobs of its own run, even if another run directory names the same job."""

from __future__ import annotations

import json
import shutil

import pytest
from login import Login, Run

STUB = ("demo", "--cluster", "stub", "job.nodes=1", "job.gpus_per_node=2")
LONG = {"steps": 10_000, "seconds": 0.1}


def is_running(run: Run) -> bool:
    return run.state() == "RUNNING"


def test_commands_for_a_copied_run_directory_leave_the_original_job_alone(login: Login) -> None:
    run = login.submit(*STUB, stub=LONG)
    run.wait_for_step(2)
    identity = json.loads(run.dir.identity.read_text())
    assert run.field("Comment") == f"mrl:{identity['id']}"
    copy = login.share / "copy"
    shutil.copytree(run.dir.root, copy, symlinks=True)
    status = json.loads(login.call("mrl", "status", copy, "--json").stdout)
    assert (status["state"], status["job"]) == ("copy", None)
    assert f"a copy of {run.dir.root}" in status["reason"]
    for words in (("cancel", copy), ("cancel", "--drain", copy), ("requeue", "--now", copy), ("cancel", "")):
        login.call("mrl", *words, "--yes", code=2)
    assert is_running(run)
    resumed = json.loads(login.call("mrl", "resume", copy, "--json", MRL_STUB=json.dumps(LONG)).stdout)
    login.jobs.append(resumed["job_id"])
    second = login.adopt(copy, resumed["job_id"])
    second.wait("RUNNING")
    assert second.field("Comment") != run.field("Comment")
    said = login.call("mrl", "cancel", "--yes", code=2).stderr
    assert "2 runs may be meant" in said and run.dir.root.name in said and "copy" in said
    login.call("mrl", "cancel", second.job)
    second.wait("CANCELLED", "COMPLETED")
    assert is_running(run)
    login.call("mrl", "cancel", code=2)
    assert is_running(run)
    login.call("mrl", "cancel", "--yes")
    run.wait("CANCELLED", "COMPLETED")


@pytest.mark.slow
def test_cancel_leaves_a_job_alone_whose_id_now_belongs_to_another_run(login: Login) -> None:
    first, second = (login.submit(*STUB, stub=LONG) for _ in range(2))
    second.wait("RUNNING")
    owner = json.loads(first.dir.job.read_text())
    login.call("mrl", "cancel", first.job)
    first.wait("CANCELLED", "COMPLETED")
    first.dir.job.write_text(json.dumps({**owner, "job_id": second.job}))  # as if Slurm had begun again at 1
    status = json.loads(login.call("mrl", "status", first.dir.root, "--json").stdout)
    assert status["state"] not in ("running", "queued", "unknown")
    assert "already ended" in login.call("mrl", "cancel", first.dir.root).stdout
    assert is_running(second)
