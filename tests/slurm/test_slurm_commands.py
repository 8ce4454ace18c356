"""Living with jobs: what mrl's commands say of a run is so, and what they are told happens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from lab import wait_until
from login import SECONDS, Login, Run

from megatron_rl.contract.files import write_atomic
from megatron_rl.contract.paths import RunDir
from megatron_rl.run_dir import read_json, write_json

LONG = {"steps": 3000, "seconds": 0.1}
STUB = ("demo", "--cluster", "stub", "job.nodes=1", "job.gpus_per_node=2")


def told(login: Login, *words: str | Path, code: int = 0, **changes: str) -> dict[str, Any]:
    return dict(json.loads(login.call("mrl", *words, "--json", code=code, **changes).stdout))


def started(login: Login, *words: str) -> Run:
    run = login.submit(*STUB, *words, stub=LONG)
    run.wait_for_step(2)
    return run


def wait_for_state(login: Login, run: Run, *states: str) -> dict[str, Any]:
    wait_until(
        f"{run.dir.root} is {' or '.join(states)}",
        lambda: told(login, "status", run.dir.root)["state"] in states,
        SECONDS,
    )
    return told(login, "status", run.dir.root)


def test_a_run_is_found_by_name_path_job_id_or_as_the_newest(login: Login) -> None:
    run = started(login)
    for name in ((), (run.dir.root.name,), (run.dir.root,), (run.job,)):
        status = told(login, "status", *name)
        assert (status["state"], status["job"]["id"], status["run_dir"]) == ("running", run.job, str(run.dir.root))
    assert status["step"] >= 2
    assert status["steps"] == 900
    assert status["attempt"] == 1
    assert "no run is called" in login.call("mrl", "status", "nobody", code=2).stderr


def test_a_waiting_run_says_what_it_waits_for(login: Login) -> None:
    first = started(login)
    second = login.submit(*STUB, "--after", first.dir.root.name, stub={"steps": 2})
    status = told(login, "status")
    assert (status["state"], status["waits_for"]) == ("queued", f"job {first.job} to end")
    listed = {one["run"]: one["state"] for one in told(login, "ls")["runs"]}
    assert listed == {first.dir.root.name: "running", second.dir.root.name: "queued"}
    assert "already" in login.call("mrl", "requeue", code=1).stderr
    login.call("mrl", "cancel", first.job)
    second.wait("COMPLETED")
    assert told(login, "status", first.job)["state"] in ("stopped", "cancelled")  # saved if there was time
    assert told(login, "status", second.job)["state"] == "finished"
    assert told(login, "status", "--all")["runs"] == []


def test_a_job_that_can_never_start_says_so(login: Login) -> None:
    login.profiles["stub"]["sbatch"] = ["--hold"]
    login.submit(*STUB)
    assert "it will not start: it is held: scontrol release" in told(login, "status")["reason"]
    assert "cancelled" in login.call("mrl", "cancel", "--drain").stdout
    assert told(login, "status")["state"] == "cancelled"


def test_a_slurm_that_cannot_be_asked_is_no_ended_job(login: Login) -> None:
    run = started(login)
    commands = login.home / "bin"  # without squeue
    commands.mkdir()
    (commands / "sbatch").symlink_to(shutil.which("sbatch") or "")
    nowhere = {"PATH": str(commands)}
    status = told(login, "status", run.dir.root, code=3, **nowhere)
    assert (status["state"], status["attempt"]) == ("unknown", 1)
    assert status["step"] >= 2
    said = login.call("mrl-submit", *STUB, "--run-dir", run.dir.root, code=2, **nowhere).stderr
    assert f"belongs to job {run.job}, and Slurm cannot be asked" in said


def test_a_live_job_owns_its_run(login: Login) -> None:
    run = started(login)
    jobs = login.lab.jobs()
    said = login.call("mrl-submit", *STUB, "--run-dir", run.dir.root, code=2).stderr
    assert f"belongs to job {run.job}, which is running on node" in said
    assert "mrl resume" in login.call("mrl", "resume", "--help").stdout
    login.call("mrl", "resume", run.dir.root, code=2)
    assert login.lab.jobs() == jobs


def test_cancel_drain_saves_and_resume_goes_on(login: Login) -> None:
    run = started(login)
    login.call("mrl", "cancel", "--drain")
    run.wait("COMPLETED", "FAILED", "CANCELLED")
    assert run.ends() == [("stopped", "cancelled")]
    status = wait_for_state(login, run, "stopped")
    steps = len(run.metrics())
    assert status["reason"] == f"saved after step {steps} (cancelled)"
    assert "ended already" in login.call("mrl", "cancel").stdout
    again = json.loads(login.call("mrl", "resume", "--json", MRL_STUB=json.dumps(LONG)).stdout)
    login.jobs.append(again["job_id"])
    assert again["run_dir"] == str(run.dir.root)
    resumed = login.adopt(run.dir.root)
    assert resumed.job != run.job
    resumed.wait_for_step(steps + 2)
    assert [line["step"] for line in resumed.metrics()] == list(range(1, len(resumed.metrics()) + 1))
    assert told(login, "status", run.job)["attempt"] == 2, "an old job id still names the run"


def test_a_requeued_run_saves_and_comes_back_by_itself(login: Login) -> None:
    run = started(login)
    assert "then it is requeued" in login.call("mrl", "requeue").stdout
    wait_until("the second attempt", lambda: run.dir.last_attempt() == 2, SECONDS)
    assert run.ends() == [("drained", "requeue")]
    assert run.field("Restarts") == "1"
    run.wait_for_step(len(run.metrics()) + 1)
    status = told(login, "status")
    assert (status["attempt"], status["job"]["restarts"], status["job"]["id"]) == (2, 1, run.job)


def test_logs_are_those_of_the_rank_asked_for(login: Login) -> None:
    run = login.submit(*STUB)
    run.wait("COMPLETED")
    log = run.dir.attempt(1).log(1)
    log.write_text("".join(f"line {number}\n" for number in range(10)))
    assert login.call("mrl", "logs", "--rank", "1", "-n", "2").stdout == "line 8\nline 9\n"
    lines = login.call("mrl", "logs", "--rank", "1", "-n", "1", "--json").stdout.splitlines()
    assert [json.loads(line) for line in lines] == [{"attempt": 1, "role": "train", "rank": 1, "line": "line 9"}]
    assert "finished after step 5" in login.call("mrl", "logs", "--role", "batch").stdout
    assert login.call("mrl", "logs", "--rank", "1", "-f").stdout.splitlines()[-1] == "line 9", "ends with the run"
    assert "no rank 7 of train; there are: 0, 1" in login.call("mrl", "logs", "--rank", "7", code=2).stderr
    assert str(log) in told(login, "logs", "--list")["files"]


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
    (step,) = login.lab.containers()[before:]
    mine = {key: step[key] for key in ("image", "mounts", "mount_home", "env", "workdir")}
    ranks = [one for one in login.lab.containers()[:before] if one["job"] == step["job"]][-1]
    assert mine == {key: ranks[key] for key in mine}
    assert login.call("mrl", "attach", "--", "sh", "-c", "exit 7", code=7)
    drained = 'scancel --signal=USR1 "$SLURM_JOB_ID.$SLURM_STEP_ID" && sleep 1; echo "$ODD,$HF_HOME,$OMP_NUM_THREADS"'
    said = login.call("mrl", "attach", "--", "sh", "-c", drained).stdout.strip()
    ranks_have = run.seen()["train.0"]["environment"]
    assert said == ",".join(ranks_have[name] for name in ("ODD", "HF_HOME", "OMP_NUM_THREADS"))
    assert "has 2 ranks" in login.call("mrl", "attach", "--rank", "2", code=2).stderr


def test_a_fork_begins_where_the_checkpoint_is(login: Login) -> None:
    run = login.submit(*STUB, "training.steps=5")
    run.wait("COMPLETED")
    make_checkpoint(run.dir, 3)
    login.call("mrl", "fork", f"{run.dir.root.name}@4", code=2)
    login.call("mrl", "fork", f"{run.dir.root.name}@3", "model.num_layers=4", code=2)
    assert len(list(login.share.glob("*/resolved.yaml"))) == 1
    said = told(login, "fork", f"{run.dir.root.name}@3", "grpo.kl_beta=0.1", "training.seed=9")
    fork = RunDir(said["run_dir"])
    login.jobs.append(said["job_id"])
    login.adopt(fork.root, said["job_id"]).wait("COMPLETED")
    assert fork.checkpoint_steps() == [3]
    assert (fork.checkpoint(3) / "weights").stat().st_ino == (run.dir.checkpoint(3) / "weights").stat().st_ino
    record = read_json(fork.fork)
    assert (record["from"], record["step"]) == (str(run.dir.root), 3)
    assert record["changes"] == {"grpo.kl_beta": [0.0, 0.1], "training.seed": [0, 9]}
    assert [line["attempt"] for line in login.adopt(fork.root).metrics()] == [1] * 5
    assert "kl_beta: 0.1" in fork.resolved.read_text()


def make_checkpoint(run: RunDir, step: int) -> None:
    folder = run.checkpoint(step)
    folder.mkdir(parents=True)
    write_json(folder / "manifest.json", {})
    (folder / "weights").write_bytes(b"0" * 100)
    write_atomic(run.latest_checkpoint, folder.name + "\n")


def test_slurm_estimates_a_start_and_nothing_is_submitted(login: Login) -> None:
    jobs = login.lab.jobs()
    said = json.loads(login.call("mrl-submit", *STUB, "--test-only", "--json").stdout)
    assert said["partition"] == "low"
    assert said["start"].startswith("2")
    assert login.lab.jobs() == jobs
    assert not list(login.home.parent.rglob("resolved.yaml"))
