"""Impossible layouts are refused with the arithmetic and with changes that work."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from functools import reduce
from typing import Any

import pytest
import yaml
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from launcher.cluster.choice import load_clusters
from launcher.cluster.profile import Profile
from launcher.errors import BadInput
from launcher.plan.placement import place
from launcher.plan.sizes import LayoutError
from launcher.plan.summary import make_plan
from launcher.recipe.load import load_recipe
from megatron_rl.recipe.job import InferenceLayout, JobConfig, PlacementConfig, TrainingLayout
from megatron_rl.recipe.model import ModelConfig

QWEN = ModelConfig(
    num_layers=64,
    hidden_size=5120,
    ffn_hidden_size=27648,
    num_attention_heads=40,
    num_query_groups=8,
    max_position_embeddings=131072,
    init="from-scratch",
)


def refused(
    nodes: int, gpus: int, node_gpus: int | None = 8, model: ModelConfig | None = None, **keys: Any
) -> list[str]:
    training = {key: keys.pop(key) for key in ("tp", "pp", "cp", "ep", "sequence_parallel") if key in keys}
    inference = InferenceLayout(**keys.pop("inference", {}))
    placement = PlacementConfig(training=TrainingLayout(**training), inference=inference, **keys)
    with pytest.raises(LayoutError) as caught:
        place(JobConfig(nodes=nodes, gpus_per_node=gpus), placement, node_gpus, model)
    return list(caught.value.problems)


def test_tensor_parallelism_larger_than_a_node():
    (problem,) = refused(6, 4, 4, tp=8)
    assert problem == (
        "placement.training.tp 8 does not divide job.gpus_per_node 4 (4 = 0 x 8 + 4): tensor-parallel groups would "
        "cross nodes; nearest that work: placement.training.tp=4 (dp 6, 6 inference replicas), or "
        "placement.training.tp=4 placement.training.pp=2 (dp 3, 6 inference replicas), or "
        "placement.training.tp=2 (dp 12, 12 inference replicas)"
    )


@pytest.mark.parametrize(
    ("tp", "cp", "gpus"), [(2, 4, 8), (4, 2, 8), (4, 4, 8), (8, 2, 8), (1, 3, 6), (1, 4, 6), (2, 1, 8)]
)
def test_a_context_parallel_group_crosses_nodes_if_its_ranks_do(tp, cp, gpus):
    job = JobConfig(nodes=4, gpus_per_node=gpus)
    plan = place(job, PlacementConfig(training=TrainingLayout(tp=tp, cp=cp)))
    nodes = defaultdict(set)
    for rank in plan.ranks:
        nodes[rank.train.tp, rank.train.pp, rank.train.dp].add(rank.node)
    assert any(len(of_group) > 1 for of_group in nodes.values()) is plan.sizes.cp_crosses_nodes


def test_the_training_ranks_must_divide():
    (problem,) = refused(8, 8, mode="partitioned", tp=8, pp=2, inference={"nodes": 5})
    assert "= 16 does not divide the 3 x 8 = 24 ranks that train (24 = 1 x 16 + 8)" in problem
    assert "placement.inference.nodes=4 (dp 2, 4 inference replicas)" in problem


def test_more_ranks_than_gpus():
    (problem,) = refused(4, 16, 8)
    assert problem.startswith(
        "job.gpus_per_node 16 is more than the 8 GPUs that a node of this cluster has; 4 x 16 = 64 ranks need 8 such "
        "nodes; nearest that work: job.nodes=8 job.gpus_per_node=8 (dp 64, 64 inference replicas)"
    )


def test_the_split_must_match_the_mode():
    (problem,) = refused(8, 8, mode="partitioned", tp=8)
    assert problem.startswith("placement.mode partitioned needs placement.inference.nodes, the nodes of 8 that only")
    assert "placement.inference.nodes=4 (dp 4, 4 inference replicas)" in problem
    (problem,) = refused(8, 8, inference={"nodes": 3})
    assert problem.startswith("placement.inference.nodes 3 belongs to placement.mode partitioned")
    assert "placement.inference.nodes=null" in problem
    (problem,) = refused(2, 8, mode="partitioned", inference={"nodes": 2})
    assert "placement.inference.nodes 2 of job.nodes 2 leaves 2 - 2 = 0 nodes to train" in problem


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"tp": 2, "ep": 16}, "placement.training.ep 16 does not divide cp x dp = 1 x 8 = 8"),
        (
            {"sequence_parallel": True},
            "placement.training.sequence_parallel splits activations between tensor-parallel",
        ),
        ({"inference": {"tp": 3}}, "placement.inference.tp 3 does not divide the 2 x 8 = 16 ranks that generate"),
    ],
)
def test_other_sizes_that_do_not_divide(keys, complaint):
    assert refused(2, 8, **keys)[0].startswith(complaint)


def test_a_replica_is_whole_nodes_or_an_equal_share_of_one():
    (problem,) = refused(4, 6, 6, mode="partitioned", inference={"nodes": 2, "tp": 4}, tp_across_nodes=True)
    assert "tp 4 is neither a number of whole nodes nor an equal share of a node with 6 GPUs (6 = 1 x 4 + 2)" in problem


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"tp": 6, "gpus": 6}, "placement.training.tp 6 does not divide model.num_attention_heads 40 (40 = 6 x 6 + 4)"),
        ({"pp": 6, "gpus": 6}, "placement.training.pp 6 does not divide model.num_layers 64 (64 = 10 x 6 + 4)"),
        ({"tp": 8, "inference": {"tp": 5}, "gpus": 40}, "placement.inference.tp 5 does not divide model.ffn_hidden_si"),
    ],
)
def test_sizes_must_divide_the_model(keys, complaint):
    assert any(problem.startswith(complaint) for problem in refused(1, keys.pop("gpus"), None, QWEN, **keys))


def test_an_engine_of_more_ranks_than_key_value_heads_needs_the_training_tp():
    model = QWEN.model_copy(update={"num_query_groups": 2})
    (problem,) = refused(1, 8, model=model, inference={"tp": 4})
    assert problem == (
        "placement.inference.tp 4 is more than model.num_query_groups 2: ranks share a key/value head only as in "
        "training, where tp is 1; nearest that work: placement.inference.tp=2 (dp 8, 4 inference replicas), or "
        "placement.inference.tp=1 (dp 8, 8 inference replicas), or placement.training.tp=4 (dp 2, 2 inference replicas)"
    )


def test_experts_must_divide_and_exist():
    moe = QWEN.model_copy(update={"num_experts": 12, "experts_per_token": 2, "expert_ffn_hidden_size": 768})
    assert refused(1, 8, model=moe, ep=8)[0].startswith("placement.training.ep 8 does not divide model.num_experts 12")
    assert refused(1, 8, model=QWEN, ep=8)[0].startswith("placement.training.ep 8 needs model.num_experts")


def test_a_refusal_points_at_the_line_or_the_override(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clusters.yaml").write_text("lab: {gpus_per_node: 4, run_root: /x}")
    profile = load_clusters(tmp_path / "clusters.yaml").profile("lab")
    text = load_recipe("demo").text.replace("device: cpu", "device: cuda")
    (tmp_path / "my.yaml").write_text(text)
    line = text[: text.index("gpus_per_node")].count("\n") + 1

    def first_problem(*overrides: str) -> str:
        with pytest.raises(BadInput) as caught:
            make_plan(load_recipe("my.yaml", overrides), profile)
        return str(caught.value.problems[0])

    assert first_problem("job.gpus_per_node=8").startswith("override 'job.gpus_per_node=8': job.gpus_per_node 8 is mo")
    assert first_problem("placement.training.tp=4").startswith("override 'placement.training.tp=4': placement.training")
    (tmp_path / "my.yaml").write_text(text.replace("gpus_per_node: 2", "gpus_per_node: 5"))
    assert first_problem().startswith(f"my.yaml:{line}: job.gpus_per_node 5 is more than the 4 GPUs")


def test_heads_that_gpus_cannot_attend_with_are_refused():
    small = ["job.nodes=1", "job.gpus_per_node=2", "model.num_attention_heads=8"]
    assert make_plan(load_recipe("demo", small), None)
    with pytest.raises(BadInput, match=r"model\.head_dim is 8 .* needs 16 or more"):
        make_plan(load_recipe("demo", [*small, "job.device=cuda"]), None)


@pytest.mark.parametrize(("gres", "refused"), [("a100", True), ("h100", False), ("gpu", False), ("l40s", False)])
def test_fp8_is_refused_where_the_profile_names_gpus_without_it(gres, refused):
    """Other GPUs are asked when the ranks start."""
    profile = Profile(gpus_per_node=8, run_root="/x", gres=gres)
    recipe = load_recipe("qwen2.5-32b-dapo", ["training.fp8=hybrid"])
    if not refused:
        assert make_plan(recipe, profile)
        return
    with pytest.raises(BadInput) as caught:
        make_plan(recipe, profile)
    (problem,) = caught.value.problems
    assert problem.startswith(
        "override 'training.fp8=hybrid': training.fp8 is hybrid, but A100 has compute capability 8.0"
    )


@examples(10)
@given(
    st.integers(1, 9),
    st.sampled_from([1, 4, 6, 8]),
    st.fixed_dictionaries({"tp": st.integers(1, 9), "pp": st.integers(1, 4), "cp": st.sampled_from([1, 2, 3])}),
    st.none() | st.integers(1, 9),
)
def test_every_suggested_layout_works(nodes, gpus, training, apart):
    values: dict[str, Any] = {
        "job": {"nodes": nodes, "gpus_per_node": gpus},
        "placement": {
            "mode": "partitioned" if apart else "colocated",
            "training": training,
            "inference": {"nodes": apart},
        },
    }

    def attempt() -> None:
        place(JobConfig(**values["job"]), PlacementConfig.model_validate(values["placement"]), 8, QWEN)

    try:
        attempt()
    except LayoutError as error:
        asked = copy.deepcopy(values)
        named = error.problems[-1].partition("nearest that work: ")[2]
        assert named, error.problems
        for layout in named.split(", or "):
            values = copy.deepcopy(asked)
            for key, value in re.findall(r"([a-z_.]+)=(\w+)", layout):
                *sections, name = key.split(".")
                section = reduce(lambda outer, inner: outer[inner], sections, values)
                section[name] = yaml.safe_load(value)
            attempt()


def test_a_range_must_begin_and_end_with_a_count_that_works():
    placement = PlacementConfig(training=TrainingLayout(tp=8, pp=2))
    with pytest.raises(LayoutError) as caught:
        place(JobConfig(nodes="3-8"), placement)
    assert str(caught.value) == (
        "placement.training.tp 8 x pp 2 x cp 1 = 16 does not divide the 3 x 8 = 24 ranks that train (24 = 1 x 16 + 8); "
        "job.nodes 3-8 must begin and end with a count that works: 4, 6, 8"
    )
    with pytest.raises(LayoutError, match=r"5 x 8 = 40 ranks that train .*; nearest that work: job.nodes=6 "):
        place(JobConfig(nodes="4-5"), PlacementConfig(training=TrainingLayout(tp=8, pp=3)))
    assert [plan.nodes for plan in place(JobConfig(nodes="4-8"), placement).smaller] == [6, 4]
    assert place(JobConfig(nodes=8), placement).smaller == ()


@pytest.mark.parametrize("nodes", ["8-4", "0-4", "04-8", "4-", "4..8", "two", True, 0, 2.0])
def test_nodes_must_be_a_number_or_a_range(nodes):
    with pytest.raises(BadInput, match=r"job.nodes: expected an integer > 0 or a range such as 4-8, got "):
        load_recipe("demo", [f"job.nodes={yaml.safe_dump(nodes).split()[0]}"])


def test_partitioned_nodes_are_counted():
    layout = ("placement.mode=partitioned", "placement.inference.nodes=1")
    with pytest.raises(BadInput, match=r"'job.nodes=4-8': job.nodes 4-8 is a range, and placement.mode partitioned"):
        load_recipe("qwen2.5-32b-dapo", ["job.nodes=4-8", *layout])


def test_every_replica_of_the_most_nodes_needs_a_prompt():
    with pytest.raises(BadInput, match="prompts_per_step 7 is smaller than the 8 data-parallel replicas"):
        load_recipe("qwen2.5-32b-dapo", ["job.nodes=4-8", "grpo.prompts_per_step=7", "grpo.global_batch=112"])
