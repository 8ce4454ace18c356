"""The state of a run: by its own record and Slurm's word together."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from run_helpers import begin, end, make_run

from launcher.backends.slurm.jobs import JobState
from launcher.errors import BadInput
from launcher.host.process.lock import RunLock
from launcher.host.record.identity import identify
from launcher.runs import state
from launcher.runs.owner import job_id_of, read_job
from launcher.runs.state import RunStatus, read_status, read_statuses
from megatron_rl.contract.attempt_records import Drain, Requeued
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import write


def slurm_run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "run", "training.steps=40", job_id="7", cluster="lab")


def job(word: str, kind: str, **facts: object) -> JobState:
    return JobState("7", word, kind, **facts)


def told(status: RunStatus) -> tuple[str, str, str]:
    return status.state, status.reason, status.waits_for


RUNNING = job("RUNNING", "running")
GONE = job("", "gone")


def test_what_is_read_from_the_run(tmp_path):
    status = read_status(slurm_run(tmp_path), RUNNING)
    assert (status.name, status.cluster, status.steps, status.attempt) == ("run", "lab", 40, 0)


def test_a_copy_has_no_part_in_the_job_of_the_original(tmp_path, monkeypatch):
    run = slurm_run(tmp_path)
    identify(run)
    begin(run, 1, job_id="7")
    shutil.copytree(run.root, tmp_path / "copy")
    monkeypatch.setattr(state, "read_owners", lambda owners: [RUNNING for _ in owners])
    copy = RunDir(tmp_path / "copy")
    theirs, ours = read_statuses([copy, run])
    assert (theirs.state, theirs.job, theirs.alive) == ("copy", None, False)
    assert theirs.reason.startswith(f"a copy of {run.root}, which is another run")
    assert (ours.state, ours.job) == ("running", RUNNING)
    with pytest.raises(BadInput, match="a copy of"):
        job_id_of(copy)
    copy.identity.write_text("{")
    assert read_statuses([copy])[0].state == "unreadable"
    with pytest.raises(BadInput, match=r"run\.json"):
        read_job(copy)
    identify(RunDir(run.root))
    run.done.write_text("")
    shutil.copytree(run.root, tmp_path / "finished")
    assert read_statuses([RunDir(tmp_path / "finished")])[0].state == "finished"


def test_a_pending_job_is_queued_and_after_a_requeue_says_why(tmp_path):
    run = slurm_run(tmp_path)
    assert told(read_status(run, job("PENDING", "pending", reason="Resources"))) == ("queued", "", "free nodes")
    begin(run, 1, job_id="7")
    end(run, 1, "drained", job_id="7", step=12, cause="preempted")
    again = job("PENDING", "pending", reason="Priority", restarts=1)
    assert told(read_status(run, again)) == ("requeued", "saved after step 12 (preempted)", "jobs of higher priority")


def test_a_running_job_runs_and_saves_when_asked(tmp_path):
    run = slurm_run(tmp_path)
    begin(run, 1, job_id="7")
    assert told(read_status(run, RUNNING)) == ("running", "", "")
    write(run.attempt(1).drain, Drain("preempted", "Slurm", 0.0))
    assert told(read_status(run, RUNNING)) == ("saving", "preempted", "the ranks to save and leave")
    begin(run, 2, job_id="7")
    assert told(read_status(run, RUNNING)) == ("running", "", ""), "the drain was of the attempt before"


@pytest.mark.parametrize(
    ("outcome", "then", "batch", "state"),
    [
        ("crashed", "over", False, "failed"),
        ("drained", "over", False, "stopped"),
        ("stopped", "over", True, "stopped"),
        ("crashed", "held", True, "failed"),
        ("drained", "requeue", True, "requeued"),  # the batch job is on its way back into the queue
        ("crashed", "requeue", True, "requeued"),
    ],
)
def test_a_run_that_has_left_an_allocation_has_ended(tmp_path, outcome, then, batch, state):
    run = slurm_run(tmp_path)
    begin(run, 1, job_id="7")
    end(run, 1, outcome, then=then, job_id="7", at=1000.0, cause=None, error="boom")
    assert read_status(run, job("RUNNING", "running", batch=batch, started_at=900.0)).state == state
    requeued_by_hand = job("RUNNING", "running", batch=batch, started_at=1100.0)
    assert read_status(run, requeued_by_hand).state == "running"
    begin(run, 2, job_id="7")
    assert read_status(run, job("RUNNING", "running", batch=batch, started_at=900.0)).state == "running"


def test_a_run_that_said_its_end_has_ended_even_where_slurm_cannot_be_asked(tmp_path):
    run = slurm_run(tmp_path)
    begin(run, 1, job_id="7")
    end(run, 1, "crashed", job_id="7", at=1.0, error="boom")
    assert read_status(run, job("", "unknown")).state == "failed"
    begin(run, 2, job_id="7")
    status = read_status(run, job("", "unknown", reason="squeue did not answer"))
    assert told(status)[:2] == ("unknown", "Slurm does not answer about job 7: squeue did not answer") and status.alive
    end(run, 2, "drained", then="requeue", job_id="7", at=2.0)
    assert read_status(run, job("", "unknown")).state == "unknown", "it may have come back"


@pytest.mark.parametrize(
    ("outcome", "facts", "state", "reason"),
    [
        ("stopped", {"step": 12, "cause": "cancelled"}, "stopped", "saved after step 12 (cancelled)"),
        ("drained", {"step": None, "cause": "time limit"}, "stopped", "left without a new checkpoint (time limit)"),
        (
            "crashed",
            {"error": "OutOfMemoryError", "rank": 3, "cause": None},
            "failed",
            "crashed: rank 3: OutOfMemoryError",
        ),
        ("lost", {"error": "its batch script was killed"}, "lost", "its batch script was killed"),
    ],
)
def test_an_ended_job_is_what_its_ledger_says(tmp_path, outcome, facts, state, reason):
    run = slurm_run(tmp_path)
    begin(run, 1, job_id="7")
    end(run, 1, outcome, job_id="7", **facts)
    for ended in (job("COMPLETED", "ended"), job("CANCELLED", "ended"), GONE):
        assert told(read_status(run, ended)) == (state, reason, "")


@pytest.mark.parametrize(
    ("facts", "ended", "why"),
    [
        ({"then": "requeue"}, job("CANCELLED", "ended"), "job 7 was cancelled"),
        ({"then": "slurm"}, job("PREEMPTED", "ended"), "job 7 ended as PREEMPTED; see the batch log"),
        (
            {"then": "requeue"},
            job("FAILED", "ended", exit_code=2),
            "job 7 ended as FAILED with exit code 2; see the bat",
        ),
        (
            {"then": "stays", "why": "goes on with the nodes that are left"},
            GONE,
            "job 7 is gone, and Slurm does not rem",
        ),
    ],
)
def test_a_run_that_did_not_come_back_says_why_and_not_that_it_will(tmp_path, facts, ended, why):
    run = slurm_run(tmp_path)
    begin(run, 1, job_id="7")
    crash = {"error": "boom", "rank": 1, "not_before": 2e9, "excluded": ["n3"]}
    end(run, 1, "crashed", job_id="7", **crash, **facts)
    state, reason, waits_for = told(read_status(run, ended))
    assert (state, waits_for) == ("failed", "")
    assert reason.startswith(f"crashed: rank 1: boom; it did not come back: {why}")


def test_a_requeue_that_slurm_refused_is_why(tmp_path):
    run = slurm_run(tmp_path)
    begin(run, 1, job_id="7")
    end(run, 1, "drained", job_id="7", step=12, cause="preempted", then="requeue")
    write(run.attempt(1).requeued, Requeued(0.0, problem="scontrol requeue 7: disabled"))
    reason = "saved after step 12 (preempted); it did not come back: scontrol requeue 7: disabled"
    assert told(read_status(run, job("FAILED", "ended"))) == ("stopped", reason, "")


def test_a_job_that_left_no_record(tmp_path):
    run = slurm_run(tmp_path)
    begin(run, 1, job_id="6")
    end(run, 1, "drained", job_id="6", step=3, cause="preempted")
    assert told(read_status(run, job("CANCELLED", "ended")))[0] == "cancelled"
    state, reason, _ = told(read_status(run, job("FAILED", "ended", exit_code=2, reason="NonZeroExitCode")))
    assert state == "failed"
    assert reason.startswith("job 7 ended as FAILED with exit code 2 (NonZeroExitCode)")
    assert told(read_status(run, GONE))[0] == "lost"


@pytest.mark.parametrize(
    ("found", "state", "reason"),
    [
        (
            job("PENDING", "pending", reason="JobHeldUser"),
            "queued",
            "it will not start: it is held: scontrol release 7",
        ),
        (
            job("FAILED", "ended", exit_code=-9, reason="JobLaunchFailure"),
            "failed",
            "the script of job 7 was killed by SIGKILL (often: out of memory), and Slurm starts no such job again",
        ),
        (
            job("FAILED", "ended", exit_code=-53, reason="JobLaunchFailure"),
            "failed",
            "job 7 could not start: its node could not write the batch log (its place, quota, disk)",
        ),
    ],
)
def test_a_job_that_will_not_start_again_waits_for_nothing_and_says_why(tmp_path, found, state, reason):
    assert told(read_status(slurm_run(tmp_path), found)) == (state, reason, "")


def test_done_is_finished_whatever_slurm_says(tmp_path):
    run = slurm_run(tmp_path)
    run.done.touch()
    for any_job in (RUNNING, GONE, job("", "unknown")):
        assert told(read_status(run, any_job)) == ("finished", "", "")


def test_a_local_run(tmp_path):
    run = make_run(tmp_path / "run")
    assert told(read_status(run, None)) == ("new", "it has never started", "")
    begin(run, 1)
    lock = RunLock(run.lock, "the supervisor")
    assert told(read_status(run, None))[0] == "running"
    lock.release()
    assert told(read_status(run, None)) == ("lost", "its supervisor was killed", "")
    end(run, 1, "drained", step=5, cause="Ctrl-C")
    assert told(read_status(run, None)) == ("stopped", "saved after step 5 (Ctrl-C)", "")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"job_id": 7}', b'{"version": 99}', None])
@pytest.mark.parametrize("name", ["job.json", "attempts.jsonl", "resolved.yaml"])
def test_one_damaged_run_is_told_and_takes_no_other_along(tmp_path, name, content):
    bad, good = make_run(tmp_path / "bad"), make_run(tmp_path / "good")
    file = bad.root / name
    if content is None:
        file.unlink(missing_ok=True)
        file.mkdir()
    else:
        file.write_bytes(content)
    damaged, whole = read_statuses([bad, good])
    assert told(whole) == ("new", "it has never started", "")
    expected = {"job.json": "unreadable", "resolved.yaml": "new"}
    assert damaged.state == expected.get(name, "new" if content is not None else "unreadable"), "a torn line is no line"
    assert (damaged.state == "unreadable") == damaged.alive
    if damaged.state == "unreadable":
        assert str(file) in damaged.reason


def test_a_run_that_one_may_not_look_into_is_unreadable(tmp_path, monkeypatch):
    run = slurm_run(tmp_path)

    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(run.done))

    monkeypatch.setattr(RunDir, "last_attempt", denied)
    assert told(read_status(run, RUNNING)) == ("unreadable", f"{run.done}: Permission denied", "")


@pytest.mark.parametrize("begun", [True, False])
def test_without_locks_only_an_attempt_that_is_open_leaves_doubt(tmp_path, monkeypatch, begun):
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(state, "owner_of", no_locks)
    run = make_run(tmp_path / "run")
    begin(run, 1)
    if begun:
        assert told(read_status(run, None))[0] == "unreadable"
    else:
        end(run, 1, "drained", step=5, cause="Ctrl-C")
        assert told(read_status(run, None))[0] == "stopped"


@pytest.mark.parametrize("cluster", ["lab", "null", "123", "true", "a.b-c_d"])
def test_a_list_of_runs_reads_cluster_and_steps_without_parsing_yaml_and_as_yaml_has_them(
    tmp_path, monkeypatch, cluster
):
    run = make_run(
        tmp_path / "run", f"cluster={cluster!r}" if cluster != "null" else "cluster=null", "training.steps=41"
    )
    values = state.resolved_values(run)
    wanted = (values["cluster"] or "local", 41)
    if cluster in ("lab", "a.b-c_d"):
        monkeypatch.setattr(state, "resolved_values", None)
    assert state._cluster_and_steps(run) == wanted
