"""The doctor says whether Slurm accepts a job and can start it.

Tested on a real Slurm 22.05: a job above a limit of the partition waits if EnforcePartLimits is NO; above a limit of a
QOS or an account it is refused if the QOS has DenyOnLimit.
"""

from __future__ import annotations

import pytest
from doctor_helpers import found, profile, recipe, said, slurm, text

from launcher.doctor.cluster import read_cluster, target


def test_an_unknown_partition():
    (problem,) = found("22.05-partition", "partition", partition="lo")
    assert (problem.level, problem.fix) == ("error", "did you mean low?")
    assert "there is none called lo; there are: high, low" in problem.text


def test_no_partition_and_no_default():
    (problem,) = found("24.05", "partition")
    assert problem.level == "error"
    assert "the cluster has no default; there are: gpu" in problem.text


def test_each_of_several_partitions_is_checked():
    several = {"partition": "low,high,hgih"}
    assert said(found("22.05-partition", "partition", **several)) == (
        "ok: low\nok: high\nerror: there is none called hgih; there are: high, low"
    )
    assert len(found("22.05-partition", "preemption", **several)) == 2
    assert len(found("22.05-partition", "dead node", **several)) == 1


def test_the_default_partition_is_named():
    assert said(found("22.05-partition", "partition")) == "ok: low, the default of the cluster"


@pytest.mark.parametrize(
    ("state", "level"), [("UP", "ok"), ("DOWN", "warning"), ("DRAIN", "error"), ("INACTIVE", "error")]
)
def test_the_state_of_a_partition(state, level):
    texts = slurm(
        "22.05-partition", partitions=text("22.05-partition", "partitions").replace("State=UP", f"State={state}")
    )
    assert [one.level for one in found(texts, "partition")] == [level]


def test_limits_of_the_qos_are_met_or_exceeded():
    wide = recipe("job.nodes=3")
    assert said(found("22.05-qos", "limits", wide, qos="burst")) == (
        "error: 24 GPUs exceed the 16 that QOS burst allows (GrpTRES): sbatch refuses it\n"
        "error: 3 nodes exceed the 2 that QOS burst allows (GrpTRES): sbatch refuses it\n"
        "error: 3 nodes exceed the 2 that QOS burst allows (MaxTRESPerJob): sbatch refuses it\n"
        "error: 24 GPUs exceed the 8 that QOS burst allows (MaxTRESPerUser): sbatch refuses it\n"
        "note: at most 2 jobs of yours can run at a time (MaxJobsPerUser of QOS burst), so the jobs of a sweep take "
        "turns"
    )
    assert "ok: the request (1 node with 8 GPUs) is within" in said(found("22.05-qos", "limits", recipe(), qos="burst"))


def test_without_deny_on_limit_the_job_would_wait():
    lenient = slurm("22.05-qos", qos=text("22.05-qos", "qos").replace("DenyOnLimit", ""))
    assert "16 that QOS burst allows (GrpTRES): the job would never start" in said(
        found(lenient, "limits", recipe("job.nodes=3"), qos="burst")
    )


def test_spare_nodes_count_and_cpu_recipes_take_no_gpus():
    spare = recipe("job.nodes=2", "job.spare_nodes=1")
    assert "3 nodes exceed the 2 that QOS burst allows" in said(found("22.05-qos", "limits", spare, qos="burst"))
    cpu = recipe("job.nodes=2", "job.device=cpu")
    assert "GPU" not in said(found("22.05-qos", "limits", cpu, qos="burst"))


def test_limits_of_the_account_and_of_the_partitions_qos():
    assert "16 GPUs exceed the 8 that account chemistry allows (GrpTRES)" in said(
        found("23.11", "limits", recipe("job.nodes=2"))
    )
    assert "104 GPUs exceed the 96 that QOS part-batch of partition batch allows (GrpTRES): sbatch refuses it" in said(
        found("25.05", "limits", recipe("job.nodes=13"))
    )


def test_limits_that_the_cluster_does_not_enforce_do_not_count():
    assert said(found("24.05", "limits", recipe("job.nodes=4"), partition="gpu")) == (
        "ok: this cluster enforces no limits of accounts and QOS (AccountingStorageEnforce)"
    )


def test_limits_on_the_nodes_of_a_job():
    assert "5 nodes exceed the 2 that partition high gives one job (MaxNodes)" in said(
        found("22.05-qos", "size", recipe("job.nodes=5"), partition="high", qos="burst")
    )
    assert "3 nodes are fewer than the 4 that gpu requires (MinNodes)" in said(
        found("24.05", "size", recipe("job.nodes=3"), partition="gpu")
    )


@pytest.mark.parametrize(
    ("cluster", "values", "expected"),
    [
        ("22.05-partition", {}, "note: none: an attempt of demo ends only on preemption"),
        ("22.05-partition", {"time_limit": "4:00:00"}, "ok: each attempt runs up to 4 h (the profile's time_limit)"),
        ("23.11", {}, "ok: each attempt runs up to 2 h (the default there)"),  # DefaultTime
        ("24.05", {"partition": "gpu"}, "ok: each attempt runs up to 4 h (the default there)"),  # MaxTime
        ("25.05", {}, "ok: each attempt runs up to 2 days (the default there)"),  # MaxWall of the partition's QOS
        (
            "22.05-qos",
            {"partition": "high", "qos": "urgent", "time_limit": "9:00:00"},
            "error: 9 h (the profile's time_limit) exceeds the 8 h of partition high (MaxTime): the job would",
        ),
        (
            "23.11",
            {"time_limit": "2-00:00:00"},
            "error: 2 days (the profile's time_limit) exceeds the 24 h of partition backfill (MaxTime): sbatch refuses",
        ),
        (
            "22.05-qos",
            {"qos": "burst", "time_limit": "6:00:00"},
            "error: 6 h (the profile's time_limit) exceeds the 4 h of QOS burst (MaxWall): sbatch refuses it",
        ),
    ],
)
def test_the_time_limit_of_an_attempt(cluster, values, expected):
    assert expected in said(found(cluster, "time limit", recipe(), **values))


def test_the_recipes_time_limit_takes_precedence_and_is_named_in_the_fix():
    (problem,) = found("24.05", "time limit", recipe("job.time_limit='5:00:00'"), partition="gpu", time_limit="1:00:00")
    assert problem.text.startswith("5 h (job.time_limit)")
    assert problem.fix == "set job.time_limit to 04:00:00 or less; the run continues in the next attempt"


def test_the_notice_before_the_limit_must_leave_time_to_work():
    text = said(found("22.05-partition", "time limit", recipe(), time_limit="10", signal_s=600))
    assert "so no attempt could do any work" in text


def test_the_account_of_the_profile_selects_its_association():
    texts = slurm(
        "22.05-qos",
        associations="Cluster|Account|User|Partition|QOS|Def QOS\n"
        "old|z|ada||urgent|urgent\n"  # the database serves another cluster too
        "lab|a|ada||normal|normal\nlab|b|ada|high|burst|burst\nlab|b|ada||normal|normal\n",
    )
    cluster = read_cluster(texts)
    names = [
        target(cluster, profile(**values), partition).qos_name
        for partition, values in (
            ("low", {}),
            ("low", {"account": "b"}),
            ("high", {"account": "b"}),
            ("high", {"account": "b", "qos": "urgent"}),
        )
    ]
    assert names == ["normal", "normal", "burst", "urgent"]
