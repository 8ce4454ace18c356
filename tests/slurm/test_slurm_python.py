"""Runs that Python submits to Slurm: the example notebook, and a job that is preempted and waited for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from lab import wait_until
from login import Login
from records import OVERRIDES, STEPS, WAIT, hold, pin, preempt, wait_until_held

HELPERS = Path(__file__).parents[1] / "helpers"
NOTEBOOK = Path(__file__).parents[2] / "examples" / "python" / "runs.ipynb"
PROGRAM = f"""
import json, sys
import submitit
from launcher.api import submit

run = submit("demo", *{OVERRIDES!r}, cluster="real")
job = run.job
print(json.dumps([str(run.path), job.job_id, isinstance(job, submitit.SlurmJob), job.done()]), flush=True)
sys.stdin.readline()
before = job.state
state = run.wait(timeout_s={WAIT})
(result,) = job.results()
rows = run.metrics()
fine = job.exception() is None and result == rows[-1]
print(json.dumps([before, state, job.state, fine, [row["step"] for row in rows]]))
print(len(job.stdout()) > 0, job.stderr())
"""
"""Submits a run, and waits for it once its input has a line."""


@pytest.mark.slow
def test_a_preempted_run_is_waited_for_and_its_job_has_the_result(login: Login) -> None:
    pin(login)
    hold(login, {"attempt": 1, "where": "generate", "step": 2})
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(
        command, env=login.env, cwd=login.home, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin and program.stdout
        root, job_id, is_slurm_job, done = json.loads(program.stdout.readline())
        login.jobs.append(job_id)
        run = login.adopt(Path(root), job_id)
        assert (is_slurm_job, done) == (True, False)
        wait_until_held(run)
        urgent = preempt(login, run)
        run.wait("PENDING")
        program.stdin.write("\n")
        program.stdin.flush()
        login.lab.run("scancel", urgent)
        before, state, word, fine, steps = json.loads(program.stdout.readline())
        assert program.stdout.readline().strip() == "True None"
    assert before in ("PENDING", "RUNNING", "CONFIGURING") and (state, word) == ("finished", "COMPLETED")
    assert fine and steps == [*range(1, STEPS + 1)]
    assert run.ends() == [("drained", "preempted"), ("finished", None)]


@pytest.mark.slow
@pytest.mark.timeout(5 * WAIT)
def test_the_example_notebook_runs_on_slurm(login: Login) -> None:
    hold(login)
    environ = {**login.env, "MRL_CLUSTER": "real"}
    command = [sys.executable, str(HELPERS / "notebook.py"), str(NOTEBOOK)]
    done = subprocess.run(
        command, env=environ, cwd=login.home, capture_output=True, text=True, timeout=4 * WAIT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "16 of 16 answers are identical" in done.stdout and "COMPLETED True 4" in done.stdout
    wait_until("the jobs have left", lambda: not login.lab.run("squeue", "--noheader", "--me").strip(), WAIT)
