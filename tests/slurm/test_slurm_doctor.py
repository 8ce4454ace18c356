"""mrl doctor on a real Slurm: what it says is what Slurm then does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import commands
import pytest
from lab import Cluster, LabError, wait_until


def doctor(cluster: Cluster, *arguments: str, **environment: str) -> dict[str, Any]:
    """Its JSON, with the exit code beside."""
    run = commands.run(["mrl", "doctor", *arguments, "--json"], 120.0, env={**cluster.env, **environment})
    assert run.returncode in (0, 1), run.stderr
    return {**json.loads(run.stdout), "exit": run.returncode}


def told(answer: dict[str, Any], topic: str) -> str:
    return "\n".join(f"{one['level']}: {one['text']}" for one in answer["findings"] if one["topic"] == topic)


def test_doctor_reports_partition_preemption_notice_signal_and_accounting(lab: Cluster) -> None:
    answer = doctor(lab, "demo", "--cluster", "lab")
    assert answer["exit"] == 0, answer
    assert told(answer, "slurm").startswith("ok: ")
    assert "by jobs of partition high" in told(answer, "preemption")
    assert "20 s (GraceTime of partition low)" in told(answer, "notice")
    assert "send_user_signal is on" in told(answer, "signal")
    assert "sacct does not work here" in told(answer, "accounting")
    assert "10 such nodes" in told(answer, "nodes")


def test_deep_check_runs_a_step_on_a_node_and_leaves_no_files(lab: Cluster) -> None:
    root = lab.directory / "doctor root"
    root.mkdir(exist_ok=True)
    profiles = lab.directory / "doctor.yaml"
    profiles.write_text(f"deep: {{partition: low, gpus_per_node: 8, gres: h100, container: null, run_root: {root}}}\n")
    answer = doctor(lab, "--cluster", "deep", "--deep", MRL_CLUSTERS=str(profiles))
    assert told(answer, "compute node").startswith("ok: a step ran on ")
    assert "a file written here is seen on" in told(answer, "run root")
    assert re.match(r"ok: \S*python\S* is 3\.", told(answer, "python"))
    assert not list(root.iterdir())


def test_pyxis_is_detected_on_a_cluster_that_loads_it(lab: Cluster) -> None:
    assert told(doctor(lab, "demo", "--cluster", "lab-pyxis"), "pyxis").startswith("ok: ")


def test_job_with_more_nodes_than_its_partition_is_an_error(lab: Cluster) -> None:
    answer = doctor(lab, "demo", "job.nodes=11", "--cluster", "lab")
    assert answer["exit"] == 1
    assert "error: 11 nodes needed, low has 10 such nodes, so the job can never start" in told(answer, "nodes")
    submit = ("sbatch", "--parsable", "--partition=low", "--nodes=11", "--wrap=true", "--output=/dev/null")
    try:
        job = lab.run(*submit).strip()
    except LabError as refused:  # Slurm 24.11
        assert "Requested node configuration is not available" in str(refused)
        return
    try:
        reason = ["squeue", "--noheader", f"--jobs={job}", "--format=%r"]
        wait_until("Slurm names its reason", lambda: lab.run(*reason).strip() == "PartitionNodeLimit", 20)
    finally:
        lab.run("scancel", job)


def test_unknown_gpu_type_is_an_error(lab: Cluster) -> None:
    profiles = lab.directory / "doctor.yaml"
    profiles.write_text("wrong: {partition: low, gpus_per_node: 8, gres: a100, container: null, run_root: /tmp}\n")
    answer = doctor(lab, "--cluster", "wrong", MRL_CLUSTERS=str(profiles))
    assert told(answer, "gpus") == "error: low has no GPU type a100; its types: h100"
    with pytest.raises(Exception, match="node configuration is not available"):
        lab.run("sbatch", "--test-only", "--partition=low", "--gpus-per-node=a100:8", "--wrap=true")


def test_missing_controller_is_reported_in_time(lab: Cluster) -> None:
    changed = {"SlurmctldPort": "1", "MessageTimeout": "2"}  # which is how long Slurm's commands try
    lines = [line for line in lab.conf.read_text().splitlines() if line.partition("=")[0] not in changed]
    dead = lab.directory / "dead.conf"
    dead.write_text("\n".join([*lines, *(f"{key}={value}" for key, value in changed.items()), ""]))
    answer = doctor(lab, "demo", "--cluster", "lab", SLURM_CONF=str(dead))
    assert answer["exit"] == 1
    assert "its controller does not answer" in told(answer, "slurm")


@pytest.fixture(scope="module")
def small(accounting_lab: Cluster) -> Iterator[Cluster]:
    """A cluster whose users all have a QOS of at most two nodes and one hour."""
    limits = ("GrpTRES=node=2", "MaxWall=1:00:00", "Flags=DenyOnLimit", "GraceTime=30")
    accounting_lab.run("sacctmgr", "-i", "add", "qos", "small", "set", *limits)
    accounting_lab.run("sacctmgr", "-i", "modify", "user", "where", "name=root", "set", "qos+=small")
    profiles = accounting_lab.directory / "doctor.yaml"
    profiles.write_text("small: {partition: low, qos: small, gpus_per_node: 8, container: null, run_root: /tmp}\n")
    yield accounting_lab


@pytest.mark.slow
def test_working_accounting_is_reported(small: Cluster) -> None:
    answer = doctor(small, "demo", "--cluster", "lab")
    assert told(answer, "accounting").startswith("ok: sacct works")


def test_qos_limits_are_an_error_exactly_if_slurm_enforces_them(small: Cluster) -> None:
    """The doctor and sbatch agree for each value of AccountingStorageEnforce."""
    profiles = str(small.directory / "doctor.yaml")
    answer = doctor(small, "demo", "job.nodes=3", "--cluster", "small", MRL_CLUSTERS=profiles)
    job = ("--test-only", "--partition=low", "--qos=small", "--nodes=3", "--wrap=true")
    refused = "QOSGrpNodeLimit" in small.run("sh", "-c", 'sbatch "$@" 2>&1', "sh", *job, check=False)
    assert refused == ("3 nodes exceed the 2 that QOS small allows (GrpTRES)" in told(answer, "limits"))
    assert refused == ("limits" in small.run("scontrol", "show", "config").partition("Enforce = ")[2].split("\n")[0])
