"""The doctor says whether a job may be submitted and would ever start.

What happens above a limit was tried on a real 22.05: a partition's limit lets the job wait where EnforcePartLimits is
NO, one of a QOS or an account refuses it where the QOS says DenyOnLimit.
"""

from __future__ import annotations

import pytest
from doctor_helpers import found, profile, recipe, said, slurm, text

from launcher.doctor.cluster import read_cluster, target


def test_a_partition_that_is_not_there():
    (problem,) = found("22.05-partition", "partition", partition="lo")
    assert (problem.level, problem.fix) == ("error", "did you mean low?")
    assert "there is none called lo; there are: high, low" in problem.text


def test_no_partition_and_no_default():
    (problem,) = found("24.05", "partition")
    assert problem.level == "error"
    assert "the cluster has no default; there are: gpu" in problem.text


def test_each_of_several_partitions_is_looked_at():
    several = {"partition": "low,high,hgih"}
    assert said(found("22.05-partition", "partition", **several)) == (
        "ok: low\nok: high\nerror: there is none called hgih; there are: high, low"
    )
    assert len(found("22.05-partition", "preemption", **several)) == 2
    assert len(found("22.05-partition", "dead node", **several)) == 1


def test_the_default_partition_is_said():
    assert said(found("22.05-partition", "partition")) == "ok: low, the default of the cluster"


@pytest.mark.parametrize(
    ("state", "level"), [("UP", "ok"), ("DOWN", "warning"), ("DRAIN", "error"), ("INACTIVE", "error")]
)
def test_the_state_of_a_partition(state, level):
    texts = slurm(
        "22.05-partition", partitions=text("22.05-partition", "partitions").replace("State=UP", f"State={state}")
    )
    assert [one.level for one in found(texts, "partition")] == [level]


def test_who_may_use_a_partition():
    assert "partition owners is for physics only, yours is chemistry" in said(
        found("23.11", "account", partition="owners")
    )
    assert "refuses scavenge, yours is scavenge" in said(found("23.11", "qos", partition="owners", qos="scavenge"))
    assert not found("23.11", "account")
    assert "is for urgent,burst only, yours is normal" in said(found("22.05-qos", "qos", partition="high"))


def test_unknown_account_qos_and_reservation():
    assert "refuses it; yours: root" in said(found("22.05-qos", "account", account="physics"))
    assert "note: account physics is not among yours (none); this cluster does not check" in said(
        found("24.05", "account", partition="gpu", account="physics")
    )
    assert "there is none called fast; there are: burst, frozen, normal, urgent" in said(
        found("22.05-qos", "qos", qos="fast")
    )
    assert "urgent is not among yours (burst, normal): sbatch refuses it" in said(
        found("22.05-qos", "qos", qos="urgent")
    )
    assert "cannot be told" in said(found("22.05-partition", "qos", qos="fast"))
    assert "there is none called monday; there are: none" in said(
        found("22.05-partition", "reservation", reservation="monday")
    )
    monday = slurm("22.05-partition", reservations="ReservationName=monday State=ACTIVE Nodes=node01\n")
    assert not found(monday, "reservation", reservation="monday")


def test_limits_of_the_qos_are_met_or_broken():
    wide = recipe("job.nodes=3")
    assert said(found("22.05-qos", "limits", wide, qos="burst")) == (
        "error: 24 GPUs are more than QOS burst allows, 16 (GrpTRES): sbatch refuses it\n"
        "error: 3 nodes are more than QOS burst allows, 2 (GrpTRES): sbatch refuses it\n"
        "error: 3 nodes are more than QOS burst allows, 2 (MaxTRESPerJob): sbatch refuses it\n"
        "error: 24 GPUs are more than QOS burst allows, 8 (MaxTRESPerUser): sbatch refuses it\n"
        "note: at most 2 jobs of yours run at a time (MaxJobsPerUser of QOS burst): sweeps take turns"
    )
    assert "ok: what is asked for (1 node with 8 GPUs) is within" in said(
        found("22.05-qos", "limits", recipe(), qos="burst")
    )


def test_without_deny_on_limit_the_job_would_wait():
    lenient = slurm("22.05-qos", qos=text("22.05-qos", "qos").replace("DenyOnLimit", ""))
    assert "16 (GrpTRES): the job would wait for ever" in said(
        found(lenient, "limits", recipe("job.nodes=3"), qos="burst")
    )


def test_spare_nodes_count_and_cpu_recipes_take_no_gpus():
    spare = recipe("job.nodes=2", "job.spare_nodes=1")
    assert "3 nodes are more than QOS burst allows" in said(found("22.05-qos", "limits", spare, qos="burst"))
    cpu = recipe("job.nodes=2", "job.device=cpu")
    assert "GPU" not in said(found("22.05-qos", "limits", cpu, qos="burst"))


def test_limits_of_the_account_and_of_the_partitions_qos():
    assert "16 GPUs are more than account chemistry allows, 8 (GrpTRES)" in said(
        found("23.11", "limits", recipe("job.nodes=2"))
    )
    assert "104 GPUs are more than QOS part-batch of partition batch allows, 96 (GrpTRES): sbatch refuses it" in said(
        found("25.05", "limits", recipe("job.nodes=13"))
    )


def test_limits_that_the_cluster_does_not_keep_are_no_limits():
    assert said(found("24.05", "limits", recipe("job.nodes=4"), partition="gpu")) == (
        "ok: this cluster keeps none of accounts and QOS (AccountingStorageEnforce)"
    )


def test_nodes_of_a_job_of_the_partition():
    assert "5 nodes are more than partition high gives one job, 2 (MaxNodes)" in said(
        found("22.05-qos", "size", recipe("job.nodes=5"), partition="high", qos="burst")
    )
    assert "3 nodes are fewer than partition gpu wants, 4 (MinNodes)" in said(
        found("24.05", "size", recipe("job.nodes=3"), partition="gpu")
    )


@pytest.mark.parametrize(
    ("cluster", "values", "told"),
    [
        ("22.05-partition", {}, "note: none: an attempt of demo ends only by preemption"),
        ("22.05-partition", {"time_limit": "4:00:00"}, "ok: each attempt runs up to 4 h (the profile's time_limit)"),
        ("23.11", {}, "ok: each attempt runs up to 2 h (the default there)"),  # DefaultTime
        ("24.05", {"partition": "gpu"}, "ok: each attempt runs up to 4 h (the default there)"),  # MaxTime
        ("25.05", {}, "ok: each attempt runs up to 2 days (the default there)"),  # MaxWall of the partition's QOS
        (
            "22.05-qos",
            {"partition": "high", "qos": "urgent", "time_limit": "9:00:00"},
            "error: 9 h (the profile's time_limit) is over the 8 h of partition high (MaxTime): the job would wait",
        ),
        (
            "23.11",
            {"time_limit": "2-00:00:00"},
            "error: 2 days (the profile's time_limit) is over the 24 h of partition backfill (MaxTime): sbatch refuses",
        ),
        (
            "22.05-qos",
            {"qos": "burst", "time_limit": "6:00:00"},
            "error: 6 h (the profile's time_limit) is over the 4 h of QOS burst (MaxWall): sbatch refuses it",
        ),
    ],
)
def test_the_time_of_an_attempt(cluster, values, told):
    assert told in said(found(cluster, "time limit", recipe(), **values))


def test_the_recipes_own_time_limit_goes_first_and_is_named_in_the_fix():
    (problem,) = found("24.05", "time limit", recipe("job.time_limit='5:00:00'"), partition="gpu", time_limit="1:00:00")
    assert problem.text.startswith("5 h (job.time_limit)")
    assert problem.fix == "set job.time_limit to 04:00:00 or less; the run goes on in the next attempt"


def test_the_notice_at_the_end_must_leave_time_to_work():
    told = said(found("22.05-partition", "time limit", recipe(), time_limit="10", signal_s=600))
    assert "so no attempt could do any work" in told


def test_an_account_of_ones_own_choice_selects_its_association():
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
