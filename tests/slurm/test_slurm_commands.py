"""Commands of mrl report the true state of a run, and do what they are asked to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from lab import LabError
from login import Login, Run

LONG = {"steps": 3000, "seconds": 0.1}
STUB = ("demo", "--cluster", "stub", "job.nodes=1", "job.gpus_per_node=2")


def told(login: Login, *words: str | Path, code: int = 0, **changes: str) -> dict[str, Any]:
    return dict(json.loads(login.call("mrl", *words, "--json", code=code, **changes).stdout))


@pytest.fixture(scope="module")
def run(owner: Login) -> Run:
    """One that goes on until the last test of this file ends it."""
    run = owner.submit(*STUB, stub=LONG)
    run.wait_for_step(2)
    return run


def test_status_finds_a_run_by_name_path_or_job_id_or_takes_the_newest(owner: Login, run: Run) -> None:
    for name in ((), (run.dir.root.name,), (run.dir.root,), (run.job,)):
        status = told(owner, "status", *name)
        assert (status["state"], status["job"]["id"], status["run_dir"]) == ("running", run.job, str(run.dir.root))
    assert status["step"] >= 2
    assert status["steps"] == 900
    assert status["attempt"] == 1
    assert "no run is called" in owner.call("mrl", "status", "nobody", code=2).stderr


def test_job_is_not_reported_as_ended_if_slurm_does_not_answer(owner: Login, run: Run) -> None:
    commands = owner.home / "bin"  # without squeue
    commands.mkdir()
    (commands / "sbatch").symlink_to(shutil.which("sbatch") or "")
    nowhere = {"PATH": str(commands)}
    status = told(owner, "status", run.dir.root, code=3, **nowhere)
    assert (status["state"], status["attempt"]) == ("unknown", 1)
    assert status["step"] >= 2
    said = owner.call("mrl-submit", *STUB, "--run-dir", run.dir.root, code=2, **nowhere).stderr
    assert f"belongs to job {run.job}, and Slurm does not answer" in said
    said = owner.call("mrl", "attach", run.dir.root, code=1, **nowhere).stderr
    assert f"Slurm does not answer about job {run.job}" in said


def test_run_with_a_live_job_is_neither_submitted_nor_resumed(owner: Login, run: Run) -> None:
    jobs = owner.lab.jobs()
    said = owner.call("mrl-submit", *STUB, "--run-dir", run.dir.root, code=2).stderr
    assert f"belongs to job {run.job}, which is running on node" in said
    owner.call("mrl", "resume", run.dir.root, code=2)
    assert owner.lab.jobs() == jobs


def test_scancel_of_pending_jobs_leaves_a_running_job_alone(owner: Login, run: Run) -> None:
    """`mrl cancel --drain` cancels a job that it believes to wait, and reports a job that is gone."""
    assert owner.lab.run("scancel", "--state=PENDING", run.job) == ""
    assert run.state() == "RUNNING"
    with pytest.raises(LabError, match="Invalid job id"):
        owner.lab.run("squeue", "--noheader", "--all", "--states=all", "--jobs=9999")
    assert owner.lab.run("squeue", "--noheader", "--all", "--states=all", "--jobs=9999,9998") == ""


def test_status_says_that_a_held_job_will_not_start(login: Login) -> None:
    login.profiles["stub"]["sbatch"] = ["--hold"]
    login.submit(*STUB)
    assert "it will not start: it is held: scontrol release" in told(login, "status")["reason"]
    assert "cancelled" in login.call("mrl", "cancel", "--drain", "--yes").stdout
    assert told(login, "status")["state"] == "cancelled"


def test_attach_runs_beside_the_rank_in_its_container(login: Login) -> None:
    link = login.home / "runs"  # containers know the run by this name only
    login.share.mkdir()
    link.symlink_to(login.share)
    login.profiles["pods"] |= {"environment": {"ODD": "it's odd"}, "run_root": str(link)}
    run = login.submit("demo", "--cluster", "pods", "job.nodes=2", "job.gpus_per_node=1", stub=LONG)
    run.wait_for_step(1)
    before = len(login.lab.containers())
    show = 'echo "$(hostname) $MRL_STEP $(pwd -P)"'
    said = login.call("mrl", "attach", "--rank", "1", "--", "sh", "-c", show).stdout.split()
    assert said == [run.seen()["train.1"]["host"], "train", str(run.dir.code.resolve())]
    ranks_have = run.seen()["train.0"]["environment"]
    (step,) = [one for one in login.lab.containers()[before:] if one["name"].endswith(":exec")]
    mine = {key: step[key] for key in ("image", "mounts", "mount_home", "env", "workdir")}
    ranks = [one for one in login.lab.containers()[:before] if one["job"] == step["job"]][-1]
    assert mine == {key: ranks[key] for key in mine}
    assert (step["name"], ranks["name"]) == (f"mrl-{run.job}-1:exec", f"mrl-{run.job}-1:no_exec")  # their own one
    mounted = [Path(mount.split(":")[1]) for mount in ranks["mounts"].split(",")]
    for path in ranks_have["PYTHONPATH"].split(":"):
        assert any(Path(path).is_relative_to(target) for target in mounted), f"{path} is not in the container"
    assert login.call("mrl", "attach", "--", "sh", "-c", "exit 7", code=7)
    drained = 'scancel --signal=USR1 "$SLURM_JOB_ID.$SLURM_STEP_ID" && sleep 1; echo "$ODD,$HF_HOME,$OMP_NUM_THREADS"'
    said = login.call("mrl", "attach", "--", "sh", "-c", drained).stdout.strip()
    assert said == ",".join(ranks_have[name] for name in ("ODD", "HF_HOME", "OMP_NUM_THREADS"))
    assert "has 2 ranks" in login.call("mrl", "attach", "--rank", "2", code=2).stderr


@pytest.mark.slow
def test_status_of_a_queued_run_names_the_job_it_waits_for(owner: Login, run: Run) -> None:
    second = owner.submit(*STUB, "--after", run.dir.root.name, stub={"steps": 2})
    status = told(owner, "status")
    assert (status["state"], status["waits_for"]) == ("queued", f"job {run.job} to end")
    listed = {one["run"]: one["state"] for one in told(owner, "ls")["runs"]}
    assert listed == {run.dir.root.name: "running", second.dir.root.name: "queued"}
    assert "already" in owner.call("mrl", "requeue", second.dir.root, code=1).stderr
    owner.call("mrl", "cancel", run.job)
    second.wait("COMPLETED")
    assert told(owner, "status", run.job)["state"] in ("stopped", "cancelled")  # saved if there was time
    assert told(owner, "status", second.job)["state"] == "finished"
    assert told(owner, "status", "--all")["runs"] == []
