"""The doctor compares the demand of a job with the nodes of the partition."""

from __future__ import annotations

import pytest
from doctor_helpers import found, recipe, said, slurm


def test_enough_nodes():
    assert said(found("22.05-partition", "nodes", recipe("job.nodes=3", "job.spare_nodes=1"))) == (
        "ok: 4 nodes with 8 GPUs each needed, low has 4 such nodes, 4 in service and 4 idle now"
    )


def test_too_few_nodes():
    (problem,) = found("22.05-partition", "nodes", recipe("job.nodes=5"))
    assert problem.level == "error"
    assert "5 nodes with 8 GPUs each needed, low has 4 such nodes, so the job can never start" in problem.text


def test_the_job_waits_for_nodes_out_of_service():
    """One of the two nodes with 8 GPUs is drained; the third node has 4 GPUs and only sleeps."""
    (warned,) = found("23.11", "nodes", recipe("job.nodes=2"))
    assert warned.level == "warning"
    assert "has 2 such nodes, but only 1 in service (1 drained): the job waits for the others" in warned.text
    assert said(found("23.11", "nodes", recipe("job.gpus_per_node=4"))).startswith("ok: 1 node with 4 GPUs needed")


def test_the_gpu_type_is_shown_and_requested():
    assert said(found("23.11", "gpus", recipe())) == (
        "ok: backfill has 1 x a100:4, 2 x h100:8; each node of demo gets 8 (--gpus-per-node=8)"
    )
    assert "--gpus-per-node=h100:8" in said(found("23.11", "gpus", recipe(), gres="h100"))


def test_an_unknown_gpu_type():
    assert said(found("22.05-partition", "gpus", recipe(), gres="a100")) == (
        "error: low has no GPU type a100; its types: h100"
    )
    assert "its types: only gpu" in said(found("24.05", "gpus", recipe(), gres="a100", partition="gpu"))


def test_a_profile_with_another_number_of_gpus_than_slurm():
    text = said(found("22.05-partition", "gpus", recipe("job.gpus_per_node=4"), gpus_per_node=4))
    assert text.endswith("note: the profile says 4 GPUs per node, Slurm says 8")


def test_no_gpus_at_all():
    (problem,) = found("23.11", "gpus", recipe(), partition="debug")
    assert (problem.level, problem.fix) == ("error", "choose another partition, or job.device=cpu")


def test_a_cpu_recipe_needs_no_gpus():
    cpu = recipe("job.device=cpu")
    assert not found("23.11", "gpus", cpu, partition="debug")
    assert said(found("22.05-partition", "nodes", cpu)).startswith("ok: 1 node needed, low has 4 such nodes")


def test_more_ranks_than_cpus():
    text = said(found("22.05-partition", "cpus", recipe("job.device=cpu"), cpus_per_task=4))
    assert text == "error: 8 ranks of 4 CPUs need 32 CPUs per node, and the nodes have 16"
    assert not found("22.05-partition", "cpus", recipe("job.device=cpu"), cpus_per_task=2)


@pytest.mark.parametrize(
    ("constraint", "topics"),
    [("h100&ib", []), ("h100", []), ("nvl72", ["error"]), ("h100|nvl72", []), ("[a*2&b*2]", [])],
)
def test_only_features_joined_by_ampersands_are_checked(constraint, topics):
    assert [one.level for one in found("23.11", "constraint", recipe(), constraint=constraint)] == topics


def test_gpus_are_not_checked_if_the_profile_requests_none():
    assert not found("23.11", "gpus", recipe(), partition="debug", gres=None)


def test_a_range_needs_its_smallest_count():
    assert said(found("22.05-partition", "nodes", recipe("job.nodes=3-8", "job.spare_nodes=1"))) == (
        "ok: 4 to 9 nodes with 8 GPUs each needed, low has 4 such nodes, 4 in service and 4 idle now"
    )


def test_a_partition_without_nodes():
    assert said(found(slurm("22.05-partition", nodes=""), "nodes", recipe())) == (
        "warning: sinfo lists none in partition low"
    )
