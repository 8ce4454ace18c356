"""What becomes of an attempt whose batch script, or supervisor, was killed before it could write the end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from launcher.host.attempt.conclude import UNSEEN, conclude_lost
from launcher.host.attempt.context import Here
from launcher.host.attempt.drain import read_cause
from launcher.host.slurm import client
from megatron_rl.contract.paths import RunDir
from megatron_rl.run_dir import append_json_line, read_json_lines, write_json

BEGAN = time.mktime(time.strptime("2026-11-21T14:44:57", "%Y-%m-%dT%H:%M:%S"))
LOG = "slurmstepd-node01: error: *** JOB {} ON node01 CANCELLED AT 2026-11-21T14:45:00{} ***\n"  # as 22.05 wrote it


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Attempt 1 was the first of job 7; nothing is known of its end. Slurm has no accounts, and lost no node."""
    monkeypatch.setattr(client, "node_states", lambda hosts: dict.fromkeys(hosts, "idle"))
    monkeypatch.setattr(client, "ended_as", lambda job_id, began: None)
    run = RunDir(tmp_path / "run")
    run.attempt(1).folder.mkdir(parents=True)
    start = {"event": "start", "attempt": 1, "at": BEGAN, "host": "node01", "job_id": "7", "restart": 0}
    append_json_line(run.attempts_ledger, {**start, "nodes": ["node01"]})
    return run


def concluded(run: RunDir, **environ: str) -> dict[str, Any]:
    """The ledger's line of the end, as a start of the run with this environment writes it."""
    conclude_lost(run, BEGAN + 60, here(run, **{"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", **environ}))
    (end,) = [line for line in read_json_lines(run.attempts_ledger) if line["event"] == "end"]
    return end


def here(run: RunDir, **environ: str) -> Here:
    return Here({"MRL_RUN_DIR": str(run.root), **environ})


@pytest.mark.parametrize(
    ("environ", "then"),
    [
        ({}, "slurm"),
        ({"SLURM_JOB_ID": "8", "MRL_SUCCEEDS": "7"}, "successor"),
        ({"SLURM_JOB_ID": "8"}, "over"),
        ({"SLURM_RESTART_COUNT": "0"}, "over"),
    ],
    ids=["it came back", "its successor goes on", "somebody resumed the run", "somebody started it again in there"],
)
def test_it_is_said_to_start_again_only_where_it_did(run: RunDir, environ: dict[str, str], then: str) -> None:
    end = concluded(run, **environ)
    assert (end["outcome"], end["then"], end["error"]) == ("lost", then, UNSEEN)


def test_a_supervisor_that_was_killed_asks_no_slurm(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_run", lambda *_: pytest.fail("asked Slurm"))
    run.attempts_ledger.unlink()
    append_json_line(run.attempts_ledger, {"event": "start", "attempt": 1, "at": BEGAN, "host": "laptop"})
    write_json(run.attempt(1).drain, {"cause": "Ctrl-C", "deadline": None})
    conclude_lost(run, BEGAN + 60, unseen="its supervisor was killed")
    end = read_json_lines(run.attempts_ledger)[-1]
    assert (end["outcome"], end["then"], end["cause"]) == ("lost", "over", "Ctrl-C")
    assert end["error"] == "its supervisor was killed"


def test_what_the_ranks_had_written_counts(run: RunDir) -> None:
    write_json(run.attempt(1).outcome, {"outcome": "drained", "step": 12})
    end = concluded(run)
    assert (end["outcome"], end["step"], end["error"]) == ("drained", 12, None)


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
    assert concluded(run)["cause"] == cause


def test_words_about_another_job_or_an_earlier_attempt_say_nothing(run: RunDir) -> None:
    earlier = LOG.format("7", " DUE TO PREEMPTION").replace("14:45:00", "14:40:00")
    run.batch_log.write_text(earlier + LOG.format("77", " DUE TO PREEMPTION"))
    assert concluded(run)["cause"] is None


def test_the_last_word_counts_as_when_a_preempted_job_is_cancelled(run: RunDir) -> None:
    run.batch_log.write_text(LOG.format("7", " DUE TO PREEMPTION") + LOG.format("7", ""))
    assert concluded(run)["cause"] is None


def test_accounts_tell_where_the_log_does_not(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ended_as", lambda job_id, began: "PREEMPTED")
    assert concluded(run)["cause"] == "preempted"


@pytest.mark.parametrize(
    ("asked", "cause"), [("requeue", "preempted"), ("signal", "preempted"), ("cancelled", "cancelled")]
)
def test_a_preemption_is_behind_a_requeue_but_not_behind_a_cancellation(run: RunDir, asked: str, cause: str) -> None:
    write_json(run.attempt(1).drain, {"cause": asked, "deadline": None})
    run.batch_log.write_text(LOG.format("7", " DUE TO PREEMPTION"))
    assert concluded(run)["cause"] == cause


@pytest.mark.parametrize(("restarts", "without"), [("1", "requeue"), ("0", "signal")])
def test_a_preemption_without_grace_is_known_while_the_job_still_leaves(
    run: RunDir, restarts: str, without: str
) -> None:
    """By then its record says no more than that the job is back in the queue, if that."""
    record = {"JobState": "COMPLETING", "Restarts": restarts, "EndTime": "Unknown"}
    asking = here(run, SLURM_JOB_ID="7", MRL_ATTEMPT="1")
    assert read_cause(asking, record, notice=600.0).cause == without
    run.batch_log.write_text(LOG.format("7", " DUE TO PREEMPTION"))
    assert read_cause(asking, record, notice=600.0).cause == "preempted"
