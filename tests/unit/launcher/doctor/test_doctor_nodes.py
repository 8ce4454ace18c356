"""The doctor compares what is asked for with the nodes of the partition."""

from __future__ import annotations

import pytest
from doctor_helpers import found, recipe, said, slurm


def test_enough_nodes():
    assert said(found("22.05-partition", "nodes", recipe("job.nodes=3", "job.spare_nodes=1"))) == (
        "ok: 4 nodes with 8 GPUs each needed, low has 4 such nodes, 4 in service and 4 idle now"
    )


def test_more_nodes_than_there_are():
    (problem,) = found("22.05-partition", "nodes", recipe("job.nodes=5"))
    assert problem.level == "error"
    assert "5 nodes with 8 GPUs each needed, low has 4 such nodes: such a job can never start" in problem.text


def test_a_range_needs_its_fewest():
    assert said(found("22.05-partition", "nodes", recipe("job.nodes=3-8", "job.spare_nodes=1"))) == (
        "ok: 4 to 9 nodes with 8 GPUs each needed, low has 4 such nodes, 4 in service and 4 idle now"
    )


def test_nodes_that_are_out_of_service_are_waited_for():
    """One of the two nodes with 8 GPUs is drained; the third has 4 and is only asleep."""
    (warned,) = found("23.11", "nodes", recipe("job.nodes=2"))
    assert warned.level == "warning"
    assert "has 2 such nodes, but only 1 in service (1 drained): the job waits for the others" in warned.text
    assert said(found("23.11", "nodes", recipe("job.gpus_per_node=4"))).startswith("ok: 1 node with 4 GPUs needed")


def test_the_kind_of_gpu_is_told_and_asked_for():
    assert said(found("23.11", "gpus", recipe())) == (
        "ok: backfill has 1 x a100:4, 2 x h100:8; each node of demo gets 8 (--gpus-per-node=8)"
    )
    assert "--gpus-per-node=h100:8" in said(found("23.11", "gpus", recipe(), gres="h100"))


def test_a_kind_that_is_not_there():
    assert said(found("22.05-partition", "gpus", recipe(), gres="a100")) == (
        "error: none is called a100 in low; there are: h100"
    )
    assert "there are: only gpu" in said(found("24.05", "gpus", recipe(), gres="a100", partition="gpu"))


def test_more_gpus_than_a_node_has():
    assert "8 GPUs a node are asked for, the nodes of backfill have:" in said(
        found("23.11", "gpus", recipe(), gres="a100")
    )


def test_a_profile_that_counts_gpus_otherwise_than_slurm():
    told = said(found("22.05-partition", "gpus", recipe("job.gpus_per_node=4"), gpus_per_node=4))
    assert told.endswith("note: the profile says 4 GPUs a node, Slurm 8")


def test_no_gpus_at_all():
    (problem,) = found("23.11", "gpus", recipe(), partition="debug")
    assert (problem.level, problem.fix) == ("error", "choose another partition, or job.device=cpu")


def test_a_cpu_recipe_needs_no_gpus():
    cpu = recipe("job.device=cpu")
    assert not found("23.11", "gpus", cpu, partition="debug")
    assert said(found("22.05-partition", "nodes", cpu)).startswith("ok: 1 node needed, low has 4 such nodes")


def test_more_ranks_than_cpus():
    told = said(found("22.05-partition", "cpus", recipe("job.device=cpu"), cpus_per_task=4))
    assert told == "error: 8 ranks of 4 CPUs are 32 a node, the nodes have 16"
    assert not found("22.05-partition", "cpus", recipe("job.device=cpu"), cpus_per_task=2)


@pytest.mark.parametrize(
    ("constraint", "topics"),
    [("h100&ib", []), ("h100", []), ("nvl72", ["error"]), ("h100|nvl72", []), ("[a*2&b*2]", [])],
)
def test_features_joined_by_and_are_looked_for_and_others_are_left_to_slurm(constraint, topics):
    assert [one.level for one in found("23.11", "constraint", recipe(), constraint=constraint)] == topics


def test_features_narrow_the_nodes():
    assert "backfill has 1 x a100:4;" in said(
        found("23.11", "gpus", recipe("job.gpus_per_node=4"), constraint="a100", gpus_per_node=4)
    )


def test_a_partition_without_nodes():
    assert said(found(slurm("22.05-partition", nodes=""), "nodes", recipe())) == (
        "warning: sinfo lists none in partition low"
    )


def test_gpus_that_slurm_does_not_know_of_are_not_looked_for_where_the_profile_asks_for_none():
    assert not found("23.11", "gpus", recipe(), partition="debug", gres=None)
