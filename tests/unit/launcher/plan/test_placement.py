"""Placement of ranks on nodes and GPUs. Coordinates are compared with megatron-core's own."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from launcher.plan.placement import Plan, place, rank_kinds
from launcher.plan.sizes import LayoutError, Sizes
from megatron_rl.contract.paths import REWARD, TEACHER
from megatron_rl.contract.plan_records import PlanStep
from megatron_rl.recipe.fixed_models import FixedModel
from megatron_rl.recipe.job import InferenceLayout, JobConfig, PlacementConfig, TrainingLayout


def planned(
    nodes: int,
    gpus: int,
    training: dict[str, Any] | None = None,
    inference: dict[str, Any] | None = None,
    node_gpus: int | None = None,
    device: Any = "cuda",
    teacher: dict[str, Any] | None = None,
    reward: dict[str, Any] | None = None,
    engine: str = "native",
    **placement: Any,
) -> Plan:
    """Partitioned if inference nodes are given. teacher: `distill.replicas`. reward: `reward.replicas`. engine:
    `inference.engine`."""
    mode: Any = "partitioned" if inference and "nodes" in inference else "colocated"
    return place(
        JobConfig(nodes=nodes, gpus_per_node=gpus, device=device),
        PlacementConfig(
            mode=mode,
            training=TrainingLayout(**training or {}),
            inference=InferenceLayout(**inference or {}),
            **placement,
        ),
        node_gpus,
        engine=engine,
        fixed=tuple(
            FixedModel(kind, key, "a/model", **{"engine": own, "tp": 1, **given})
            for kind, key, own, given in (
                (TEACHER, "distill.replicas", "native", teacher),
                (REWARD, "reward.replicas", "vllm", reward),
            )
            if given
        ),
    )


def first_gpu(step: PlanStep, plan: Plan) -> int:
    """First GPU of a step on its node; the script computes the same (CUDA_VISIBLE_DEVICES)."""
    return int(step.name.partition("-")[2] or 0) * step.gpus_per_node % plan.gpus_per_node


def gpus_of(step: PlanStep, plan: Plan) -> range:
    return range(first_gpu(step, plan), first_gpu(step, plan) + step.gpus_per_node)


def test_eight_nodes_of_eight_gpus_hold_eight_replicas_of_eight():
    plan = planned(8, 8, {"tp": 8})
    assert (plan.sizes.dp, plan.sizes.replicas) == (8, 8)
    assert [(step.name, step.nodes, step.tasks_per_node) for step in plan.steps] == [("train", list(range(8)), 8)]
    rank = plan.ranks[19]
    assert (rank.node, rank.gpu, rank.role) == (2, 3, "colocated")
    assert rank.train is not None
    assert rank.infer is not None
    assert (rank.train.tp, rank.train.dp, rank.infer.replica, rank.infer.rank) == (3, 2, 2, 3)


def test_three_nodes_train_and_five_generate():
    plan = planned(8, 8, {"tp": 8}, {"nodes": 5})
    assert (plan.sizes.dp, plan.sizes.replicas) == (3, 5)
    assert [(step.name, step.nodes) for step in plan.steps] == [
        ("train", [0, 1, 2]),
        *((f"infer-{k}", [3 + k]) for k in range(5)),
    ]
    assert Counter(rank.role for rank in plan.ranks) == {"training": 24, "inference": 40}


def test_replicas_smaller_than_a_node_share_it():
    plan = planned(3, 8, {"tp": 8}, {"nodes": 1, "tp": 4})
    assert [(step.name, step.nodes, step.tasks_per_node, first_gpu(step, plan)) for step in plan.steps[1:]] == [
        ("infer-0", [2], 4, 0),
        ("infer-1", [2], 4, 4),
    ]


def test_a_vllm_beside_the_ranks_is_one_process_on_the_gpus_of_its_share_of_a_node() -> None:
    plan = planned(2, 8, {"tp": 4, "pp": 2}, {"tp": 4}, engine="vllm")
    train, *fronts = plan.steps
    assert (train.name, train.nodes, train.tasks_per_node) == ("train", [0, 1], 8)
    assert not train.shares_devices
    assert {(step.tasks_per_node, step.gpus_per_node, step.shares_devices) for step in fronts} == {(1, 4, True)}
    assert [(step.name, step.nodes, first_gpu(step, plan)) for step in fronts] == [
        ("infer-0", [0], 0),
        ("infer-1", [0], 4),
        ("infer-2", [1], 0),
        ("infer-3", [1], 4),
    ]
    for rank in plan.ranks:  # worker r of front K is on the GPU of training rank K * tp + r
        assert rank.infer is not None
        front = fronts[rank.infer.replica]
        assert (front.nodes[0], first_gpu(front, plan) + rank.infer.rank) == (rank.node, rank.gpu)
    assert [(kind.role, kind.world) for kind in rank_kinds(plan.sizes)] == [
        ("colocated", 16),
        ("colocated", 16),
        ("inference", 4),
    ]


def test_a_teacher_has_nodes_of_its_own_also_where_a_vllm_is_beside_the_ranks() -> None:
    plan = planned(3, 4, None, {"tp": 2}, teacher={"nodes": 1, "tp": 4}, engine="vllm")
    assert [(step.name, step.nodes, step.shares_devices) for step in plan.steps] == [
        ("train", [0, 1], False),
        *((f"infer-{replica}", [replica // 2], True) for replica in range(4)),
        ("teacher-0", [2], False),
    ]


def test_a_large_vllm_is_whole_nodes_with_one_process_on_each() -> None:
    plan = planned(6, 8, {"tp": 8}, {"nodes": 4, "tp": 8, "pp": 2}, engine="vllm")
    assert [(step.name, step.nodes, step.tasks_per_node, step.gpus_per_node) for step in plan.steps[1:]] == [
        ("infer-0", [2, 3], 1, 8),
        ("infer-1", [4, 5], 1, 8),
    ]
    last_of_first, first_of_second = plan.ranks[31].infer, plan.ranks[32].infer
    assert last_of_first is not None
    assert first_of_second is not None
    assert (last_of_first.replica, last_of_first.rank) == (0, 15)
    assert (first_of_second.replica, first_of_second.rank) == (1, 0)


@pytest.mark.parametrize(
    ("inference", "why"),
    [
        ({"tp": 8, "pp": 3}, "placement.inference.tp 8 x pp 3 x dp 1 = 24 does not divide the 4 x 8 = 32 ranks"),
        ({"tp": 8, "dp": 2, "ep": 8}, "placement.inference.ep 8 is neither 1 nor tp x dp = 8 x 2 = 16"),
        (
            {"tp": 8, "dp": 2, "ep": 16, "nodes_per_replica": 4},
            "placement.inference.nodes_per_replica is 4, but the 16 GPUs of a replica are on 2 nodes",
        ),
        ({"tp": 16}, "placement.inference.tp 16 does not divide job.gpus_per_node 8"),
    ],
)
def test_sizes_of_a_large_vllm_that_do_not_fit_are_refused_with_the_arithmetic(
    inference: dict[str, Any], why: str
) -> None:
    with pytest.raises(LayoutError) as refused:
        planned(6, 8, None, {"nodes": 4, **inference}, engine="vllm")
    assert refused.value.problems[0].startswith(why)


def test_each_count_of_a_range_has_the_vllms_of_its_nodes() -> None:
    job = JobConfig(nodes="2-3", gpus_per_node=4)
    plan = place(job, PlacementConfig(inference=InferenceLayout(tp=2)), engine="vllm")
    assert [len(each.steps) - 1 for each in (plan, *plan.smaller)] == [6, 4]


@pytest.mark.parametrize("across", [False, True])
def test_a_vllm_beside_the_ranks_does_not_cross_nodes(across: bool) -> None:
    with pytest.raises(
        LayoutError, match=r"placement\.inference\.tp 3 does not divide job\.gpus_per_node 8"
    ) as refused:
        planned(3, 8, None, {"tp": 3}, engine="vllm", tp_across_nodes=across)
    assert len(refused.value.problems) == 1
    assert "placement.inference.tp=2" in str(refused.value)


@pytest.mark.parametrize("inference", [None, {"nodes": 1}])
def test_the_last_nodes_hold_the_teacher_in_both_modes(inference):
    plan = planned(4, 8, {"tp": 4}, inference, teacher={"nodes": 2, "tp": 4})
    training = 1 if inference else 2
    assert (plan.sizes.training_nodes, plan.sizes.dp, plan.sizes.fixed[0].replicas(8)) == (training, 2 * training, 4)
    teachers = [(step.name, step.nodes, step.tasks_per_node, first_gpu(step, plan)) for step in plan.steps[-4:]]
    assert teachers == [
        ("teacher-0", [2], 4, 0),
        ("teacher-1", [2], 4, 4),
        ("teacher-2", [3], 4, 0),
        ("teacher-3", [3], 4, 4),
    ]
    assert Counter(rank.role for rank in plan.ranks)["teacher"] == 16
    last = plan.ranks[-1]
    assert last.infer is not None and (last.infer.replica, last.infer.rank) == (3, 3)


def test_a_teacher_in_vllm_is_one_process_a_replica():
    *_, step = planned(2, 8, teacher={"nodes": 1, "tp": 8, "engine": "vllm"}).steps
    assert (step.name, step.tasks_per_node, step.gpus_per_node) == ("teacher-0", 1, 8)


def test_the_reward_model_is_behind_the_teacher_on_the_last_nodes() -> None:
    plan = planned(6, 8, None, {"nodes": 2}, teacher={"nodes": 1, "tp": 8}, reward={"nodes": 2, "tp": 4})
    assert plan.sizes.training_nodes == 1
    last = [(step.name, step.nodes, step.tasks_per_node, first_gpu(step, plan)) for step in plan.steps[-5:]]
    assert last == [
        ("teacher-0", [3], 8, 0),
        ("reward-0", [4], 1, 0),
        ("reward-1", [4], 1, 4),
        ("reward-2", [5], 1, 0),
        ("reward-3", [5], 1, 4),
    ]
    ranks = Counter(rank.role for rank in plan.ranks)
    assert ranks == {"training": 8, "inference": 16, "teacher": 8, "reward": 16}


def test_nodes_of_the_reward_model_that_are_not_there_are_refused_with_the_nearest_layouts() -> None:
    with pytest.raises(
        LayoutError, match=r"reward\.replicas\.nodes 2 of job\.nodes 2 leaves 2 - 2 = 0 nodes"
    ) as refused:
        planned(2, 8, None, None, reward={"nodes": 2})
    assert "reward.replicas.nodes=1" in str(refused.value)


@pytest.mark.parametrize(
    ("nodes", "inference", "teacher", "why"),
    [
        (1, None, {"nodes": 1}, "distill.replicas.nodes 1 of job.nodes 1 leaves 1 - 1 = 0 nodes to train"),
        (
            2,
            {"nodes": 1},
            {"nodes": 1},
            "placement.inference.nodes 1 and distill.replicas.nodes 1 of job.nodes 2 leave",
        ),
        (2, None, {"nodes": 1, "tp": 3}, "distill.replicas.tp 3 does not divide job.gpus_per_node 8"),
    ],
)
def test_nodes_of_the_teacher_that_are_not_there_are_refused_with_the_nearest_layouts(nodes, inference, teacher, why):
    with pytest.raises(LayoutError, match=why) as refused:
        planned(nodes, 8, None, inference, teacher=teacher)
    assert "nearest that work" in str(refused.value)


def test_a_partitioned_recipe_of_one_node_is_told_of_a_second_one() -> None:
    with pytest.raises(LayoutError, match=r"nearest that work: job\.nodes=2 placement\.inference\.nodes=1"):
        place(JobConfig(nodes=1, gpus_per_node=2), PlacementConfig(mode="partitioned"))


def test_spare_nodes_have_no_ranks():
    plan = place(JobConfig(nodes=2, gpus_per_node=4, spare_nodes=1), PlacementConfig())
    assert plan.spare_nodes == 1
    assert {rank.node for rank in plan.ranks} == {0, 1}


def test_cpu_processes_are_not_limited_by_gpus():
    assert len(planned(2, 16, node_gpus=8, device="cpu").ranks) == 32
    with pytest.raises(LayoutError, match="16 is more than the 8 GPUs"):
        planned(2, 16, node_gpus=8)


LAYOUTS = [
    {"world": 64, "tp": 8, "pp": 1, "cp": 1, "ep": 1},
    {"world": 64, "tp": 4, "pp": 2, "cp": 2, "ep": 4},
    {"world": 48, "tp": 2, "pp": 3, "cp": 1, "ep": 8},
    {"world": 32, "tp": 1, "pp": 4, "cp": 4, "ep": 2},
    {"world": 24, "tp": 3, "pp": 2, "cp": 2, "ep": 1},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout.values())))
def test_coordinates_are_those_of_megatron_core(layout):
    """Coordinates equal those of the generators that `initialize_model_parallel` builds its groups with."""
    from megatron.core.parallel_state import RankGenerator

    world, tp, pp, cp, ep = layout.values()
    order, dp = "tp-cp-ep-dp-pp", world // (tp * pp * cp)
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    experts = RankGenerator(tp=tp, ep=ep, dp=world // (tp * ep * pp), pp=pp, cp=1, order=order)
    sizes = {key: layout[key] for key in ("tp", "pp", "cp", "ep")}
    plan = planned(1, world, sizes)
    for name, generator in (("tp", dense), ("pp", dense), ("cp", dense), ("dp", dense), ("ep", experts)):
        found = {rank: place for group in generator.get_ranks(name) for place, rank in enumerate(group)}
        assert [getattr(rank.train, name) for rank in plan.ranks] == [found[rank] for rank in range(world)], name


@pytest.mark.parametrize("tp", [1, 4, 8])
def test_colocated_replicas_are_the_data_parallel_ranks_of_their_own_layout(tp):
    from megatron.core.parallel_state import RankGenerator

    generator = RankGenerator(tp=tp, ep=1, dp=32 // tp, pp=1, cp=1, order="tp-cp-ep-dp-pp")
    plan = planned(4, 8, {"tp": 4, "cp": 2}, {"tp": tp})
    for name, coordinate in (("dp", "replica"), ("tp", "rank")):
        found = {rank: place for group in generator.get_ranks(name) for place, rank in enumerate(group)}
        assert [getattr(rank.infer, coordinate) for rank in plan.ranks] == [found[rank] for rank in range(32)]


def divisors(number: int) -> st.SearchStrategy[int]:
    return st.sampled_from([size for size in range(1, number + 1) if number % size == 0])


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any valid layout."""
    nodes, gpus, across = draw(st.integers(1, 12)), draw(st.sampled_from([1, 2, 3, 4, 6, 8])), draw(st.booleans())
    apart = draw(st.integers(0, nodes - 1))
    training = (nodes - apart) * gpus
    tp = draw(divisors(training if across else gpus))
    pp = draw(divisors(training // tp))
    cp = draw(divisors(training // (tp * pp)))
    ep = draw(divisors(training // (tp * pp)))
    generating = (apart or nodes) * gpus
    replica = draw(divisors(generating if across else gpus))
    assume(not apart or gpus % replica == 0 or replica % gpus == 0)
    inference = {"tp": replica} | ({"nodes": apart} if apart else {})
    return planned(nodes, gpus, {"tp": tp, "pp": pp, "cp": cp, "ep": ep}, inference, tp_across_nodes=across)


@given(plans())
def test_every_gpu_has_exactly_one_owner(plan):
    places = [(rank.node, rank.gpu) for rank in plan.ranks]
    assert places == sorted(itertools.product(range(plan.nodes), range(plan.gpus_per_node)))
    assert [rank.rank for rank in plan.ranks] == list(range(len(places)))
    owners = Counter((node, gpu) for step in plan.steps for node in step.nodes for gpu in gpus_of(step, plan))
    assert owners == Counter(places)


@given(plans())
def test_steps_start_the_ranks_of_the_plan(plan):
    owner = {(node, gpu): step for step in plan.steps for node in step.nodes for gpu in gpus_of(step, plan)}
    for rank in plan.ranks:
        step = owner[rank.node, rank.gpu]
        if rank.train is None:
            assert rank.infer is not None
            assert step.name == f"infer-{rank.infer.replica}"
        else:
            assert step.name == "train"
        # srun numbers tasks node by node: SLURM_PROCID is the rank in the step's world.
        task = step.nodes.index(rank.node) * step.tasks_per_node + rank.gpu - first_gpu(step, plan)
        world = rank.train if rank.train is not None else rank.infer
        assert world is not None
        assert world.rank == task


@given(plans())
def test_tensor_parallel_groups_never_cross_a_node_unless_asked(plan):
    groups = defaultdict(set)
    for rank in plan.ranks:
        if rank.train is not None:
            groups["train", rank.train.pp, rank.train.cp, rank.train.dp].add(rank.node)
        if rank.infer is not None:
            groups["infer", rank.infer.replica].add(rank.node)
    assert plan.sizes.tp_across_nodes or all(len(nodes) == 1 for nodes in groups.values())


POWERS = st.sampled_from([1, 2, 4])


@given(tp=POWERS, pp=st.integers(1, 6), dp=POWERS, inference_tp=POWERS, partitioned=st.booleans())
def test_every_rank_has_a_kind_that_is_rehearsed(
    tp: int, pp: int, dp: int, inference_tp: int, partitioned: bool
) -> None:
    """A training rank belongs to the first, the last or an inner stage; an inference rank is of one kind."""
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
    ends = {(stage == 0, stage == pp - 1) for stage in range(pp)}
    assert {(kind.stage == 0, kind.stage == pp - 1) for kind in training} == ends
    assert len(training) == len(ends)
    generating = [kind for kind in kinds if kind.role == "inference"]
    assert [(kind.rank, kind.world) for kind in generating] == [(0, inference_tp)] * partitioned
    assert {kind.role for kind in training} == {"training" if partitioned else "colocated"}
