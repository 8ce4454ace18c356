"""Watching a job owns nothing: Ctrl-C leaves it alone. Inside an allocation the run is ours, and Ctrl-C saves it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from commands import Command
from json_files import read_json_lines
from lab import wait_until
from login import SECONDS, Login
from together import Together

from megatron_rl.contract.paths import RunDir

STUB = ("demo", "--cluster", "stub", "job.nodes=1", "job.gpus_per_node=2")

together = Together()


def start(login: Login, *command: str | Path, **stub: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*map(str, command)],
        cwd=login.home,
        env={**login.env, "MRL_STUB": json.dumps(stub)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str] | Command) -> tuple[int, str]:
    try:
        said, _ = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    return process.returncode, said


def wait_for_steps(run: RunDir, steps: int) -> None:
    wait_until(f"{run.root} has {steps} steps", lambda: len(read_json_lines(run.metrics)) >= steps, SECONDS)


@together
def test_follow_shows_the_run_until_it_is_finished(login: Login) -> None:
    code, said = end(login.start("mrl-submit", *STUB, "--follow", MRL_STUB='{"steps": 20, "seconds": 0.1}'))
    assert code == 0, said
    assert "runs on node" in said
    assert re.search(r"^finished: \d+ steps", said, re.MULTILINE)


@together
def test_ctrl_c_stops_watching_and_leaves_the_job_alone(login: Login) -> None:
    root = login.share / "run"
    long = '{"steps": 3000, "seconds": 0.1}'
    process = login.start("mrl-submit", *STUB, "--run-dir", root, "--follow", MRL_STUB=long)
    run = RunDir(root)
    wait_for_steps(run, 2)
    process.send_signal(signal.SIGINT)
    code, said = end(process)
    job = login.adopt(root)
    login.jobs.append(job.job)
    assert code == 130
    assert f"stopped watching; job {job.job} continues" in said
    steps = len(job.metrics())
    job.wait_for_step(steps + 3)
    assert not run.attempt(1).drain.exists()


@pytest.mark.slow
@together
def test_follow_reports_a_crash_with_its_rank_and_step(login: Login) -> None:
    crash = '{"steps": 3000, "crash_at": 3}'
    code, said = end(login.start("mrl-submit", *STUB, "job.backoff_s=1", "--follow", MRL_STUB=crash))
    assert code == 1
    assert "requeued: crashed at step 3 (training): rank 1 on node" in said, said
    assert "failed: rank 1 in step 3 (training): RuntimeError: boom" in said
    assert "resume:      mrl resume demo-" in said
    attempts = re.findall(r"runs on .*, attempt (\d)", said)
    assert attempts == sorted(set(attempts)), said


@together
def test_run_inside_an_allocation_finishes(login: Login) -> None:
    said = login.call("mrl-submit", *STUB, "--in-allocation", code=2).stderr
    salloc = said.strip().partition("get one with: ")[2].split()
    root = login.share / "run"
    inside = login.command("mrl-submit", *STUB, "--run-dir", root, "--in-allocation")
    code, said = end(start(login, *salloc, *inside, steps=5))
    assert code == 0, said
    assert [line["step"] for line in read_json_lines(RunDir(root).metrics)] == [1, 2, 3, 4, 5]
    assert "attempt 1: finished after step 5" in said


@together
def test_ctrl_c_inside_an_allocation_saves(login: Login) -> None:
    root = login.share / "run"
    inside = login.command("mrl-submit", *STUB, "--run-dir", root, "--in-allocation")
    process = start(login, "salloc", "--nodes=1", "--exclusive", "--partition=low", *inside, steps=3000, seconds=0.1)
    run = RunDir(root)
    wait_for_steps(run, 2)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGINT)  # salloc itself would give the allocation back
    _, said = end(process)
    assert "saving, then ending" in said
    outcome = [line for line in read_json_lines(run.attempts_ledger) if line["event"] == "end"]
    assert [line["outcome"] for line in outcome] == ["drained"], said


@pytest.mark.slow
@together
def test_cancel_of_an_ended_run_keeps_the_users_allocation(login: Login) -> None:
    root = login.share / "run"
    inside = login.command("mrl-submit", *STUB, "--run-dir", root, "--in-allocation")
    mrl = login.command("mrl")[0]
    then = f'"$@"; {mrl} cancel --drain {root}; {mrl} cancel {root}; sleep 1; squeue -h -j $SLURM_JOB_ID -o "then %T"'
    salloc = ("salloc", "--nodes=1", "--exclusive", "--partition=low", "sh", "-c", then, "sh")
    _, said = end(start(login, *salloc, *inside, steps=3000, seconds=0.01, crash_at=3))
    assert said.count("already ended: failed") == 2, said
    assert "then RUNNING" in said


@together
def test_cancelled_run_keeps_the_users_allocation(login: Login) -> None:
    root = login.share / "run"
    inside = login.command("mrl-submit", *STUB, "--run-dir", root, "--in-allocation")
    then = '"$@"; squeue -h -j $SLURM_JOB_ID -o "then %T"'
    salloc = ("salloc", "--nodes=1", "--exclusive", "--partition=low", "sh", "-c", then, "sh")
    process = start(login, *salloc, *inside, steps=3000, seconds=0.1)
    wait_for_steps(RunDir(root), 2)
    assert "stays" in login.call("mrl", "cancel", root).stdout
    _, said = end(process)
    assert "then RUNNING" in said
    (last,) = [line for line in read_json_lines(RunDir(root).attempts_ledger) if line["event"] == "end"]
    assert (last["outcome"], last["cause"]) == ("stopped", "cancelled")
