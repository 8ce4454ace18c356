"""Which ranks of a plan are rehearsed: one of every kind, and none that is like another."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from launcher.plan.placement import rank_kinds
from launcher.plan.sizes import Sizes
from megatron_rl.rank.config import InferenceLayout, JobConfig, PlacementConfig, TrainingLayout

POWERS = st.sampled_from([1, 2, 4])


@given(tp=POWERS, pp=st.integers(1, 6), dp=POWERS, inference_tp=POWERS, partitioned=st.booleans())
def test_every_rank_is_of_the_kind_of_one_that_is_rehearsed(
    tp: int, pp: int, dp: int, inference_tp: int, partitioned: bool
) -> None:
    """A rank is a stage of a pipeline, the first, the last or one between; or it generates alone."""
    training_nodes, inference_nodes = tp * pp * dp, 2 if partitioned else None
    job = JobConfig(nodes=training_nodes + (inference_nodes or 0), gpus_per_node=4)
    placement = PlacementConfig(
        mode="partitioned" if partitioned else "colocated",
        training=TrainingLayout(tp=tp, pp=pp),
        inference=InferenceLayout(nodes=inference_nodes, tp=inference_tp),
    )
    kinds = rank_kinds(Sizes.of(job, placement, job.most_nodes))
    training = [kind for kind in kinds if kind.role != "inference"]
    world = 4 * training_nodes
    assert {kind.world for kind in training} == {world}
    assert [kind.rank * pp // world for kind in training] == [kind.stage for kind in training]
    assert all(kind.rank * pp % world == 0 for kind in training)
    place = {(stage == 0, stage == pp - 1) for stage in range(pp)}
    assert {(kind.stage == 0, kind.stage == pp - 1) for kind in training} == place
    assert len(training) == len(place)
    generating = [kind for kind in kinds if kind.role == "inference"]
    assert [(kind.rank, kind.world) for kind in generating] == [(0, inference_tp)] * partitioned
    assert {kind.role for kind in training} == {"training" if partitioned else "colocated"}
