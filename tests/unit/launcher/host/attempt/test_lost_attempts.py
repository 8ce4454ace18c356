"""An attempt whose batch script, or supervisor, was killed before it could record its end is concluded later."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.host.attempt.conclude import UNSEEN, conclude_lost
from launcher.host.attempt.job_context import JobContext
from launcher.host.attempt.slurm_job import SlurmJob
from launcher.host.record.ledger import ends_in, read_ledger
from launcher.host.slurm import queries
from megatron_rl.contract.attempt_records import AttemptEnd, AttemptStart, Drain, Outcome
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import append, write

BEGAN = time.mktime(time.strptime("2026-11-21T14:44:57", "%Y-%m-%dT%H:%M:%S"))
LOG = "slurmstepd-node01: error: *** JOB {} ON node01 CANCELLED AT 2026-11-21T14:45:00{} ***\n"  # as 22.05 wrote it


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Attempt 1 was the first of job 7; nothing is known of its end. Slurm has no accounts, and lost no node."""
    monkeypatch.setattr(queries, "node_states", lambda hosts: dict.fromkeys(hosts, "idle"))
    monkeypatch.setattr(queries, "ended_as", lambda job_id, began: None)
    run = RunDir(tmp_path / "run")
    run.attempt(1).folder.mkdir(parents=True)
    append(run.attempts_ledger, AttemptStart(1, BEGAN, "node01", "7", nodes=["node01"]))
    return run


def concluded(run: RunDir, job_id: str = "7", restarts: int = 1, succeeds: str | None = None) -> AttemptEnd:
    """The ledger's line of the end, as a start of the run in such a job writes it."""
    conclude_lost(run, BEGAN + 60, JobContext(run, "lab", job_id, [], restarts=restarts, succeeds=succeeds))
    (end,) = ends_in(read_ledger(run))
    return end


@pytest.mark.parametrize(
    ("job", "then"),
    [
        ({}, "slurm"),
        ({"job_id": "8", "restarts": 0, "succeeds": "7"}, "successor"),
        ({"job_id": "8", "restarts": 0}, "over"),
        ({"restarts": 0}, "over"),
    ],
    ids=["it came back", "its successor goes on", "somebody resumed the run", "somebody started it again in there"],
)
def test_it_is_said_to_start_again_only_where_it_did(run: RunDir, job: dict[str, str], then: str) -> None:
    end = concluded(run, **job)
    assert (end.outcome, end.then, end.error) == ("lost", then, UNSEEN)


def test_a_supervisor_that_was_killed_asks_no_slurm(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(queries, "call", lambda *_: pytest.fail("asked Slurm"))
    run.attempts_ledger.unlink()
    append(run.attempts_ledger, AttemptStart(1, BEGAN, "laptop"))
    write(run.attempt(1).drain, Drain("Ctrl-C", "me", BEGAN))
    conclude_lost(run, BEGAN + 60, unseen="its supervisor was killed")
    (end,) = ends_in(read_ledger(run))
    assert (end.outcome, end.then, end.cause, end.error) == ("lost", "over", "Ctrl-C", "its supervisor was killed")


def test_what_the_ranks_had_written_counts(run: RunDir) -> None:
    write(run.attempt(1).outcome, Outcome("drained", 12))
    end = concluded(run)
    assert (end.outcome, end.step, end.error) == ("drained", 12, None)


@pytest.mark.parametrize(
    ("why", "cause"),
    [
        (" DUE TO PREEMPTION", "preempted"),
        (" DUE TO TIME LIMIT", "time limit"),
        (" DUE TO JOB REQUEUE", "requeue"),
        (" DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS", "node failure"),
        (" DUE TO MAGIC", None),
        ("", None),
    ],
)
def test_the_cause_is_what_slurm_wrote_into_the_batch_log(run: RunDir, why: str, cause: str | None) -> None:
    run.batch_log.write_text("starting\n" + LOG.format("7", why) + "Terminated\n")
    assert concluded(run).cause == cause


def test_words_about_another_job_or_an_earlier_attempt_say_nothing(run: RunDir) -> None:
    earlier = LOG.format("7", " DUE TO PREEMPTION").replace("14:45:00", "14:40:00")
    run.batch_log.write_text(earlier + LOG.format("77", " DUE TO PREEMPTION"))
    assert concluded(run).cause is None


def test_the_last_word_counts_as_when_a_preempted_job_is_cancelled(run: RunDir) -> None:
    run.batch_log.write_text(LOG.format("7", " DUE TO PREEMPTION") + LOG.format("7", ""))
    assert concluded(run).cause is None


def test_accounts_tell_where_the_log_does_not(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "ended_as", lambda job_id, began: "PREEMPTED")
    assert concluded(run).cause == "preempted"


@pytest.mark.parametrize(
    ("asked", "cause"), [("requeue", "preempted"), ("signal", "preempted"), ("cancelled", "cancelled")]
)
def test_a_preemption_is_behind_a_requeue_but_not_behind_a_cancellation(run: RunDir, asked: str, cause: str) -> None:
    write(run.attempt(1).drain, Drain(asked, "me", BEGAN))
    run.batch_log.write_text(LOG.format("7", " DUE TO PREEMPTION"))
    assert concluded(run).cause == cause


@pytest.mark.parametrize(("restarts", "without"), [("1", "requeue"), ("0", "signal")])
def test_a_preemption_without_grace_is_known_while_the_job_still_leaves(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, restarts: str, without: str
) -> None:
    """Its record then shows at most that the job is back in the queue."""
    record = {"JobState": "COMPLETING", "Restarts": restarts, "EndTime": "Unknown"}
    job = SlurmJob(JobContext(run, "lab", "7", []), notice=600.0, backoff=30.0, outlives_nodes=False)
    monkeypatch.setattr(queries, "show_job", lambda job_id: record)
    request = Drain("signal", "SIGTERM to the batch host", BEGAN)
    assert job.complete(run.attempt(1), request).cause == without
    run.batch_log.write_text(LOG.format("7", " DUE TO PREEMPTION"))
    assert job.complete(run.attempt(1), request).cause == "preempted"


def test_the_zone_of_somebodys_shell_is_not_that_of_slurms_daemons(tmp_path: Path) -> None:
    program = """
import time
from launcher.host.job import _use_zone_of_host
from launcher.host.slurm.formats import time_of
print(time_of("2026-11-21T14:45:00"))
_use_zone_of_host()
print(time_of("2026-11-21T14:45:00"))
"""
    environ = {**os.environ, "TZ": "Pacific/Kiritimati"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    there, here = map(float, done.stdout.split())
    assert here == time.mktime(time.strptime("2026-11-21T14:45:00", "%Y-%m-%dT%H:%M:%S")) != there
