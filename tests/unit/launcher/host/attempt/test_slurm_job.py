"""Slurm's record completes a request to leave."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from launcher.host.attempt.job_context import JobContext, JobRefused, context_of
from launcher.host.attempt.slurm_job import SlurmJob
from launcher.host.judge.nodes import ABSENT_FROM_FABRIC
from launcher.host.slurm import queries
from launcher.host.slurm.formats import text_of
from megatron_rl.contract.attempt_records import Drain, NodeAssignment
from megatron_rl.contract.codes import RUN_DIR_VARIABLE
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import write

KILL_WAIT_S = 45


@pytest.mark.parametrize(("ends_in_s", "left_s"), [(-2, KILL_WAIT_S - 2), (600, 600)], ids=["at once", "later"])
def test_ranks_have_until_the_end_of_the_job_or_until_it_is_killed_where_slurm_ends_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_in_s: int, left_s: int
) -> None:
    now = int(time.time())
    record = f"JobId=7 JobState=COMPLETING EndTime={text_of(now + ends_in_s)} PreemptTime=None"
    answers = {"job": record, "config": f"KillWait                = {KILL_WAIT_S} sec\n"}
    monkeypatch.setattr(queries, "call", lambda command: answers[command[2]])
    run = RunDir(tmp_path)
    job = SlurmJob(JobContext(run, "lab", "7", ["n1"]), notice=60.0, backoff=30.0, outlives_nodes=False)
    fuller = job.complete(run.attempt(1), Drain("signal", "SIGTERM to the batch host", now))
    assert (fuller.end, fuller.deadline) == (now + ends_in_s, now + left_s)


@pytest.mark.parametrize(
    ("state", "cause"), [("RUNNING", None), ("COMPLETING", "cancelled")], ids=["a crash", "a job that was cancelled"]
)
def test_a_job_that_slurm_ended_did_not_crash_though_its_signal_found_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, cause: str | None
) -> None:
    end = text_of(int(time.time()) - 3)
    answers = {"job": f"JobId=7 JobState={state} StartTime={end} EndTime={end}", "config": ""}
    monkeypatch.setattr(queries, "call", lambda command: answers[command[2]])
    run = RunDir(tmp_path)
    run.attempt(1).folder.mkdir(parents=True)
    job = SlurmJob(JobContext(run, "lab", "7", ["n1"]), notice=60.0, backoff=30.0, outlives_nodes=False)
    request = job.final_request(run.attempt(1), None, drained=False)
    assert (request and request.cause) == cause


def test_a_task_of_an_array_is_refused(tmp_path: Path) -> None:
    """An order for the array's own id applies to all of its tasks."""
    with pytest.raises(JobRefused, match="a task of array 5: submit the script without --array"):
        context_of({"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "5", RUN_DIR_VARIABLE: str(tmp_path)})


def test_a_node_that_came_late_to_the_all_reduce_is_excluded_when_it_does_so_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "call", lambda command: "")
    run = RunDir(tmp_path)
    job = SlurmJob(JobContext(run, "lab", "7", ["n1"]), notice=60.0, backoff=30.0, outlives_nodes=False)
    job.unfit = {"n1": ABSENT_FROM_FABRIC, "n2": "7 of 8 GPUs are there"}
    assert job.facts(run.attempt(2), None).bad == ["n2"]
    run.attempt(1).folder.mkdir(parents=True)
    write(run.attempt(1).nodes, NodeAssignment(0, {}, [], {"n1": ABSENT_FROM_FABRIC}))
    assert job.facts(run.attempt(2), None).bad == ["n1", "n2"]
