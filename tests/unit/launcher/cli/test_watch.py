"""Announcements about a watched job."""

from __future__ import annotations

from pathlib import Path

from launcher.backends.slurm.jobs import JobState
from launcher.cli.submit.watch import _news
from launcher.runs.state import read_status
from megatron_rl.contract.attempt_records import AttemptEnd, AttemptStart
from megatron_rl.contract.codes import DRAINED
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import append


def test_a_requeued_job_that_starts_is_not_announced_as_its_last_attempt(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    job = JobState("7", "RUNNING", "running", nodes="n1", started_at=100.0)
    append(run.attempts_ledger, AttemptStart(1, 1.0, job_id="7"))
    run.attempt(1).folder.mkdir(parents=True)
    assert _news(read_status(run, job)) == "job 7 runs on n1, attempt 1"
    append(run.attempts_ledger, AttemptEnd(1, 2.0, DRAINED, job_id="7", then="requeued"))
    assert _news(read_status(run, job)) == "job 7 has started on n1, waiting for its attempt to begin"
