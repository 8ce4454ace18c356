"""Recorded output of two versions of Slurm about the same jobs parses to the same values
(tests/slurm/record_output.py)."""

from __future__ import annotations

import pytest
from doctor_helpers import RECORDED, text

from launcher.backends.slurm.cluster_facts import oneliners, settings, version
from launcher.backends.slurm.jobs import JobState, parse_sacct, parse_squeue
from launcher.host.judge.causes import cause_of, has_script, is_ending, is_requeueable, is_returning
from launcher.host.slurm import queries
from launcher.host.slurm.formats import expand_hosts, is_dead, parse_fields, time_of

VERSIONS = {"22.05-jobs": (22, 5), "24.11-jobs": (24, 11)}

pytestmark = pytest.mark.parametrize("recorded", VERSIONS)

JOBS = {
    "completed": ("ended", 0),
    "failed": ("ended", 3),
    "killed": ("ended", -9),
    "cancelled": ("ended", None),
    "timeout": ("ended", None),
    "node_fail": ("ended", None),
    "held": ("pending", None),
    "dependent": ("pending", None),
    "preempted": ("pending", None),
    "allocation": ("running", None),
    "urgent": ("running", None),
}
"""Name -> kind, exit code."""


def listed(recorded: str) -> dict[str, JobState]:
    return {job.name: job for job in parse_squeue(text(recorded, "squeue"))}


def job(recorded: str, name: str) -> dict[str, str]:
    """`scontrol show job -o`."""
    return parse_fields(text(recorded, f"job-{name}").strip())


def test_states_and_exit_codes(recorded):
    assert {name: (one.kind, one.exit_code) for name, one in listed(recorded).items()} == JOBS


def test_what_else_is_read_of_a_listed_job(recorded):
    jobs = listed(recorded)
    assert {name: one.restarts for name, one in jobs.items() if one.restarts} == {"preempted": 1}
    assert {name for name, one in jobs.items() if not one.batch} == {"allocation"}
    assert jobs["completed"].comment == "project=x mrl:" + "a" * 32
    assert jobs["dependent"].dependency == f"afterany:{jobs['held'].job_id}(unfulfilled)"
    assert (jobs["held"].reason, jobs["dependent"].reason) == ("JobHeldUser", "Dependency")
    assert jobs["urgent"].nodes == "node[02-03]"
    assert all(one.submitted_at is not None for one in jobs.values())
    ended = jobs["timeout"]
    assert None not in (ended.started_at, ended.ended_at)
    assert jobs["allocation"].ended_at is None


def test_the_record_of_a_job(recorded):
    records = {name: job(recorded, name) for name in JOBS}
    assert {record["JobId"] for record in records.values()} == {one.job_id for one in listed(recorded).values()}
    assert {name for name, record in records.items() if not has_script(record)} == {"allocation"}
    assert {name for name, record in records.items() if not is_requeueable(record)} == {"node_fail"}
    for name, record in records.items():
        assert (record["JobName"], record["Partition"]) == (name, "high" if name == "urgent" else "low")
        assert record["ExcNodeList"] == "(null)"
        assert time_of(record["SubmitTime"]) is not None
    assert expand_hosts(records["urgent"]["NodeList"]) == ["node02", "node03"]


def test_a_preempted_job_in_its_grace_time_and_after_it(recorded):
    grace, completing, waiting = (
        job(recorded, name) for name in ("preempted-in-grace", "preempted-completing", "preempted")
    )
    now = time_of(grace["PreemptTime"]) or 0.0
    assert cause_of(grace, now, notice=60.0).cause == "preempted"
    assert is_ending(grace)
    assert not is_returning(grace, restarts=0)
    for record in (completing, waiting):
        assert is_returning(record, restarts=0)
        assert not is_returning(record, restarts=1)
        assert has_script(record)


def test_a_cancelled_job_and_one_whose_node_died(recorded):
    causes = {
        name: cause_of(job(recorded, name), 4e9, notice=60.0).cause for name in ("cancelled", "node_fail", "timeout")
    }
    assert causes == {"cancelled": "cancelled", "node_fail": "node failure", "timeout": "time limit"}


def test_nodes_and_steps(recorded, monkeypatch):
    monkeypatch.setattr(queries, "call", lambda command: text(recorded, "steps" if "--steps" in command else "sinfo"))
    states = queries.node_states([f"node{number:02d}" for number in range(1, 6)])
    assert [node for node, state in states.items() if is_dead(state)] == ["node04"]
    assert states["node05"] == "drained"
    preempted = listed(recorded)["preempted"].job_id
    assert queries.steps_of(preempted) == [f"{preempted}.0"]
    assert queries.step_called(preempted, "sleep") == f"{preempted}.0"


def test_the_settings_of_a_cluster(recorded, monkeypatch):
    assert (version(text(recorded, "version")) or ())[:2] == VERSIONS[recorded]
    config = settings(text(recorded, "config"))
    assert (config["ClusterName"], config["PreemptType"]) == ("lab", "preempt/partition_prio")
    low, high = oneliners(text(recorded, "partitions"))
    assert (low["PreemptMode"], low["GraceTime"], high["PreemptMode"]) == ("REQUEUE", "20", "OFF")

    def call(command: list[str]) -> str:
        return text(recorded, "config") if "config" in command else text(recorded, "partitions").splitlines()[0]

    monkeypatch.setattr(queries, "call", call)
    assert queries.kill_wait() == 5.0
    assert queries.preemption_cancels(job(recorded, "preempted-in-grace")) is False


def test_accounting(recorded):
    if not (RECORDED / recorded / "sacct.txt").exists():
        pytest.skip("recorded without accounting")
    told = {one.name: (one.kind, one.exit_code) for one in parse_sacct(text(recorded, "sacct"))}
    assert told == JOBS
    assert {one.name: one.restarts for one in parse_sacct(text(recorded, "sacct")) if one.restarts} == {"preempted": 1}
