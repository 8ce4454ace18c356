"""States are parsed from Slurm's answers, and no answer never counts as "no such job"."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slurm_text import squeue_record

from launcher.backends.slurm.jobs import parse_sacct, parse_squeue, read_jobs, read_owners
from launcher.host.slurm.formats import time_of
from megatron_rl.contract.run_records import Owner

BLANK = {
    "JobID": "7",
    "State": "RUNNING",
    "Reason": "None",
    "RestartCnt": "0",
    "exit_code": "0",
    "SubmitTime": "2026-11-21T06:57:57",
    "EligibleTime": "2026-11-21T06:57:57",
    "StartTime": "N/A",
    "EndTime": "N/A",
    "TimeLimit": "1:00:00",
    "Dependency": "(null)",
    "NodeList": "",
    "Name": "demo",
    "Comment": "(null)",
    "BatchFlag": "1",
}


def squeue_line(**fields: str) -> str:
    return squeue_record(**{**BLANK, **fields})


UNKNOWN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put commands of our own making on PATH, for answers that no cluster gives on demand."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")

    def make(name: str, script: str) -> None:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    return make


@pytest.mark.parametrize(("flag", "batch"), [("0", False), ("1", True), ("7", True)])
def test_an_allocation_that_somebody_works_in_has_no_script(flag, batch):
    """Slurm raises BatchFlag whenever it requeues a job by itself."""
    (job,) = parse_squeue(squeue_line(BatchFlag=flag))
    assert job.batch is batch


def test_a_running_job():
    (job,) = parse_squeue(squeue_line(RestartCnt="2", NodeList="node[01-02]", StartTime="2026-11-21T07:00:00"))
    assert (job.job_id, job.kind, job.reason, job.restarts, job.nodes) == ("7", "running", "", 2, "node[01-02]")
    assert job.started_at == time.mktime((2026, 11, 21, 7, 0, 0, 0, 0, -1))
    assert job.owns


def test_a_job_without_a_time_limit_has_no_end_until_it_ended():
    end = "2027-11-21T07:00:00"
    assert parse_squeue(squeue_line(EndTime=end))[0].ended_at == time_of(end)
    assert parse_squeue(squeue_line(EndTime=end, TimeLimit="UNLIMITED"))[0].ended_at is None
    assert parse_squeue(squeue_line(EndTime=end, TimeLimit="UNLIMITED", State="FAILED"))[0].ended_at == time_of(end)


@pytest.mark.parametrize(
    ("word", "kind", "owns"),
    [
        ("PENDING", "pending", True),
        ("REQUEUE_HOLD", "pending", True),
        ("COMPLETING", "running", True),
        ("PREEMPTED", "ended", False),
        ("NODE_FAIL", "ended", False),
        ("EXPEDITING", "pending", True),
        ("REVOKED", "unknown", True),  # another cluster of a federation has started it
        ("A_WORD_OF_SLURM_30", "unknown", True),
    ],
)
def test_what_a_state_means_for_the_run(word, kind, owns):
    (job,) = parse_squeue(squeue_line(State=word))
    assert (job.word, job.kind, job.owns) == (word, kind, owns)


@given(name=st.text(st.characters(categories=("L", "N", "P", "S", "Zs")), min_size=1, max_size=60).map(str.strip))
def test_any_job_name_is_read_whole(name):
    line = squeue_line(Name=name, Reason="Nodes are DOWN, DRAINED | reserved", Comment="mrl:1", BatchFlag="0")
    (job,) = parse_squeue(line)
    assert (job.name, job.comment, job.batch) == (name, "mrl:1", False)
    assert job.reason == "Nodes are DOWN, DRAINED | reserved"


@pytest.mark.parametrize(
    ("state", "said", "code"),
    [
        ("FAILED", "768", 3),  # before 23.02
        ("FAILED", "9", -9),
        ("CANCELLED", "15", None),
        ("FAILED", "3:0", 3),  # since
        ("FAILED", "0:9", -9),
        ("COMPLETED", "0:0", 0),
        ("CANCELLED", "0:15", None),
        ("FAILED", "", None),  # 23.02 and later, where Slurm has none on record
        ("FAILED", "exited 3", None),  # of no version yet
    ],
)
def test_the_exit_code_of_a_script_that_ended_by_itself(state, said, code):
    (job,) = parse_squeue(squeue_line(State=state, exit_code=said))
    assert (job.kind, job.exit_code) == ("ended", code)


def test_a_node_list_of_any_length_and_a_comment_of_two_lines_leave_the_other_fields_alone():
    nodes = "node[" + ",".join(map(str, range(0, 4000, 2))) + "]"
    (job,) = parse_squeue(squeue_line(NodeList=nodes, Comment="two\nlines mrl:1", BatchFlag="3"))
    assert (job.nodes, job.name, job.comment, job.batch) == (nodes, "demo", "two\nlines mrl:1", True)


def test_accounting_shows_the_newest_attempt_and_counts_the_others():
    (job,) = parse_sacct(
        "7|PREEMPTED|0:0|2026-11-21T06:00:00|2026-11-21T06:01:00|2026-11-21T06:05:00|node01|a|b\n"
        "7|CANCELLED by 1000|0:15|2026-11-21T06:05:00|2026-11-21T06:06:00|2026-11-21T06:09:00|node02|a|b\n"
    )
    assert (job.word, job.kind, job.restarts, job.nodes, job.name) == ("CANCELLED", "ended", 1, "node02", "a|b")
    assert job.exit_code is None
    (killed,) = parse_sacct("7|FAILED|0:9|2026-11-21T06:00:00|2026-11-21T06:01:00|2026-11-21T06:05:00|node01|a")
    assert killed.exit_code == -9


def test_numbers_that_make_no_sense_leave_a_job_unknown(fake, tmp_path):
    (tmp_path / "listed").write_text(squeue_line(RestartCnt="twice"))
    fake("squeue", f"cat {tmp_path}/listed")
    fake("scontrol", "echo 'JobId=7 JobState=RUNNING'")
    assert read_jobs(["7"])["7"].kind == "unknown"


def test_a_job_that_nobody_knows_is_gone(fake):
    fake("squeue", UNKNOWN)
    fake("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    job = read_jobs(["7"])["7"]
    assert (job.kind, job.owns) == ("gone", False)


def test_a_job_that_only_accounting_remembers_has_ended(fake):
    fake("squeue", "exit 0")
    fake("scontrol", UNKNOWN)
    fake("sacct", "echo '7|COMPLETED|0:0|Unknown|Unknown|Unknown|node01|demo'")
    jobs = read_jobs(["7", "8"])
    assert (jobs["7"].kind, jobs["7"].exit_code, jobs["8"].kind) == ("ended", 0, "gone")


def test_a_job_that_accounting_alone_believes_alive_is_gone(fake):
    fake("squeue", "exit 0")
    fake("scontrol", UNKNOWN)
    fake("sacct", "echo '7|RUNNING|0:0|Unknown|Unknown|Unknown|node01|demo'")
    assert read_jobs(["7"])["7"].kind == "gone"


@pytest.mark.parametrize(
    "script",
    ["echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1", "exit 1"],
)
def test_a_controller_that_does_not_answer_makes_a_job_unknown(fake, script):
    fake("squeue", script)
    fake("sacct", "echo '7|COMPLETED|0:0|Unknown|Unknown|Unknown|node01|demo'")
    job = read_jobs(["7"])["7"]
    assert (job.kind, job.owns) == ("unknown", True)
    assert job.reason


@pytest.mark.parametrize("said", ["", "\0 %$ State=x [1-", "\n\n", "squeue (wrapped): ok"])
def test_a_squeue_that_says_nothing_of_use_makes_a_job_unknown(fake, tmp_path, said):
    (tmp_path / "said").write_text(said)
    fake("squeue", f"cat {tmp_path}/said")
    fake("scontrol", "echo 'JobId=7 JobState=RUNNING'")
    fake("sacct", "echo nonsense")
    job = read_jobs(["7"])["7"]
    assert (job.kind, job.owns) == ("unknown", True)
    assert "no answer that makes sense" in job.reason


def test_no_squeue_at_all_makes_a_job_unknown(fake, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    job = read_jobs(["7"])["7"]
    assert (job.kind, job.reason) == ("unknown", "squeue: no such command here")


def test_a_job_of_another_cluster_is_unknown_whatever_has_its_id_here(fake, tmp_path):
    (tmp_path / "listed").write_text(squeue_line())
    fake("squeue", f"cat {tmp_path}/listed")
    fake("scontrol", "echo 'Configuration data as of now'; echo 'ClusterName             = west'")
    owners = [Owner("7", "lab", 0.0, slurm_cluster=name) for name in ("west", "east", None)]
    here, there, unsaid = read_owners(owners)
    assert (here.kind, unsaid.kind) == ("running", "running")
    assert (there.kind, there.reason) == ("unknown", "it is a job of east, and this is west")
    fake("scontrol", "exit 1")
    (unnamed,) = read_owners(owners[:1])
    assert (unnamed.kind, unnamed.reason) == ("unknown", "it is a job of west, and Slurm does not answer here")


def test_a_job_that_has_the_id_of_an_earlier_one_is_not_taken_for_it(fake, tmp_path):
    (tmp_path / "listed").write_text(squeue_line(Comment=f"project=x mrl:{'b' * 32}", Name="theirs"))
    fake("squeue", f"cat {tmp_path}/listed")
    fake("scontrol", "echo 'ClusterName             = west'")
    ours, theirs = (Owner("7", "lab", 0.0, slurm_cluster="west", run_id=letter * 32) for letter in "ab")
    first, second = read_owners([ours, theirs])
    assert (first.kind, first.reason) == ("gone", "another job has its id now (theirs)")
    assert second.kind == "running"


def test_a_job_that_this_cluster_does_not_know_is_not_gone_where_nobody_knows_which_cluster_it_is_of(fake):
    fake("squeue", UNKNOWN)
    fake("sacct", "exit 0")
    fake("scontrol", "echo 'ClusterName             = west'")
    known, unsaid = read_owners([Owner("7", "lab", 0.0, slurm_cluster=name) for name in ("west", None)])
    assert (known.kind, unsaid.kind) == ("gone", "unknown")
    assert "remove job.json once it has ended" in unsaid.reason


def test_more_jobs_than_fit_on_a_command_line_are_asked_about_in_parts(fake):
    fake("squeue", "exit 0")
    fake("scontrol", UNKNOWN)
    fake("sacct", "exit 0")
    ids = [str(10_000_000 + number) for number in range(20_000)]
    assert {job.kind for job in read_jobs(ids).values()} == {"gone"}
