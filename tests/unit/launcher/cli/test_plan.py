"""mrl plan: the nodes, the arithmetic, the JSON of plan.json, and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

import pytest
from click.testing import CliRunner, Result

from launcher.cli.plan import command
from launcher.cli.show.layout import warnings
from launcher.cli.show.node_lines import node_lines
from launcher.cluster.choice import load_clusters
from launcher.plan.placement import Plan
from launcher.plan.summary import batch, make_plan, summarize
from launcher.recipe.load import load_recipe

RECIPE = "qwen2.5-32b-dapo"
IMPOSSIBLE = ("placement.training.tp=5",)
pytestmark = pytest.mark.usefixtures("no_clusters_of_the_user")


def mrl_plan(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(command, list(arguments))


def plan_of(overrides: Sequence[str] = ()) -> Plan:
    return make_plan(load_recipe(RECIPE, overrides), None)


def test_each_node_has_a_line_with_its_groups_of_ranks():
    plan = plan_of(["job.nodes=3", "placement.mode=partitioned", "placement.inference.nodes=1"])
    assert [*node_lines(plan)] == ["    node 0 dp0", "    node 1 dp1", "    node 2 r0"]
    deep = ["job.nodes=4", "placement.training.tp=4", "placement.training.pp=2", "placement.training.cp=2"]
    assert [*node_lines(plan_of(deep))][2:] == ["    node 2 dp0 p1 c0 | dp0 p1 c1", "    node 3 dp1 p1 c0 | dp1 p1 c1"]


def test_replicas_beside_the_ranks_are_on_the_line_of_their_node():
    plan = plan_of(["job.nodes=2", "placement.training.tp=4", "placement.inference.tp=2", "inference.engine=vllm"])
    assert [*node_lines(plan)] == [
        "    node 0 dp0 | dp1 with r0 | r1 | r2 | r3",
        "    node 1 dp2 | dp3 with r4 | r5 | r6 | r7",
    ]
    shown = mrl_plan(RECIPE, "--cluster", "h100", "inference.engine=vllm", "placement.inference.tp=4").output
    assert "vllm beside the training ranks, in turns on the same GPUs" in " ".join(shown.split())
    assert "r: inference replica, in turns on the same GPUs" in " ".join(shown.split())


def test_many_similar_nodes_are_folded():
    lines = [*node_lines(plan_of(["job.nodes=64", "job.spare_nodes=2"]))]
    assert len(lines) == 6
    assert lines[3:] == [
        "       ... 60 more nodes like these",
        "   node 63 dp63",
        "     spare 2 more nodes, to replace others",
    ]


def test_the_command_shows_batches_memory_and_checkpoints():
    result = mrl_plan(RECIPE, "--cluster", "h100")
    assert result.exit_code == 0
    assert all(len(line) <= 80 for line in result.output.splitlines())
    for text in (
        "8 nodes x 8 GPUs = 64 ranks",
        "tp 8 x pp 1 x cp 1 x dp 8 = 64 ranks",
        "64 prompts x 16 answers = 1,024 answers; 8 prompts x 16 per replica",
        "32,763,876,352 parameters",
        "2 bytes x 4.1 billion parameters",
        "of 80 GiB",
        "427 GiB; 2 kept = 854 GiB",
    ):
        assert text in result.output
    said = " ".join(result.output.split())
    assert "host 53.4 GiB of a node's memory: 53.4 GiB to write checkpoints from" in said
    assert "in its fullest phase (generate)" in said
    assert "off-load gradients are in GPU memory only while training" in said


def test_off_loaded_state_and_an_engine_with_another_tp_are_counted():
    said = " ".join(mrl_plan(RECIPE, "placement.offload=optimizer", "placement.inference.tp=4").output.split())
    assert "host 99.2 GiB of a node's memory: 53.4 GiB to write checkpoints from, 45.8 GiB of optimizer state" in said
    assert "8 prompts x 16 per replica, 4 per inference replica" in said


def test_the_demo_needs_no_cluster_and_no_gpu():
    result = mrl_plan("demo")
    assert result.exit_code == 0
    assert "demo on local" in result.output
    assert "2 processes" in result.output
    assert "GPU" not in result.output


def test_a_plan_that_does_not_fit_is_warned_about_with_a_remedy():
    result = mrl_plan(RECIPE, "--cluster", "h100", "inference.max_batch=256")
    assert result.exit_code == 0
    assert "the largest term is KV cache" in " ".join(result.output.split())
    record = json.loads(mrl_plan(RECIPE, "--cluster", "h100", "inference.max_batch=256", "--json").output)
    (warning,) = warnings(record)
    assert warning.startswith("one colocated GPU needs about")
    assert list(warnings(json.loads(mrl_plan("demo", "--json").output))) == []


def test_context_parallel_groups_that_cross_nodes_are_warned_about():
    across = [RECIPE, "--cluster", "h100", "placement.training.tp=4", "placement.training.cp=4", "job.nodes=4"]
    assert (
        "warning: placement.training.tp 4 x cp 4 = 16 does not divide job.gpus_per_node 8: context-parallel groups "
        "cross nodes, so the keys and values of every layer are sent over the network; with cp 2 they would not"
    ) in " ".join(mrl_plan(*across).output.split())
    within = json.loads(mrl_plan(*across, "placement.training.cp=2", "--json").output)
    assert within["training"]["cp_crosses_nodes"] is False
    assert not any("cross nodes" in warning for warning in warnings(within))


def test_the_json_is_the_summary_with_the_times():
    asked = load_recipe(RECIPE, ["placement.mode=partitioned", "placement.inference.nodes=5"])
    profile = load_clusters().profile("h100")
    plan = make_plan(asked, profile)
    result = mrl_plan(
        RECIPE, "placement.mode=partitioned", "placement.inference.nodes=5", "--cluster", "h100", "--json"
    )
    record = json.loads(result.output)
    assert len(record.pop("splits")) == 8
    assert len(record.pop("runs")) == 4
    assert record.pop("engine") == "native"
    assert "the profile names no vLLM" in record.pop("engine_because")
    assert record == json.loads(json.dumps(summarize(asked.config, plan, profile)))
    roles = [(role["name"], role["first"], role["behind"]) for role in record["roles"]]
    assert roles == [("train", 0, 5), ("infer", -5, 0)]
    assert [(each["role"], each["stage"]) for each in record["memory"]] == [("training", 0), ("inference", None)]


def test_the_vocabulary_is_assumed_only_if_unknown():
    assert not json.loads(mrl_plan(RECIPE, "--json").output)["model"]["assumed"]
    model = load_recipe(RECIPE).config.model.model_dump() | {"vocab_size": None, "huggingface": "org/elsewhere"}
    result = mrl_plan(RECIPE, f"model={json.dumps(model)}")
    assert "assuming a vocabulary of 152,064" in " ".join(result.output.split())


def test_batch_arithmetic_counts_unequal_shares_and_several_updates():
    overrides = ["job.nodes=3", "grpo.prompts_per_step=10", "grpo.group_size=4", "grpo.global_batch=20"]
    config = load_recipe(RECIPE, overrides).config
    found = batch(config, plan_of(overrides))
    assert (found.answers, found.prompts_per_replica) == (40, (3, 4))
    assert (found.updates, found.answers_per_update) == (2, 20)
    assert found.microbatches == 8  # half of 4 x 4 answers, each as long as a micro-batch


@pytest.mark.parametrize("more", [(), ("placement.mode=partitioned", "placement.inference.nodes=2"), IMPOSSIBLE])
def test_a_plan_for_2048_nodes_is_no_more_work_than_one_and_a_half_for_8(more):
    """Work is counted in calls of Python functions, and the first plan of a process imports modules."""

    def calls(nodes: int) -> int:
        count = 0

        def profile(frame: FrameType, event: str, argument: object) -> None:
            nonlocal count
            count += event == "call"

        batch = ("grpo.prompts_per_step=8192", "grpo.global_batch=8192")
        for _ in range(2):
            count = 0
            sys.setprofile(profile)
            try:
                result = mrl_plan(RECIPE, "--cluster", "h100", f"job.nodes={nodes}", *batch, *more)
            finally:
                sys.setprofile(None)
            assert result.exit_code == (2 if more == IMPOSSIBLE else 0)
        return count

    assert calls(2048) <= 1.5 * calls(8)


def test_a_range_of_nodes_is_drawn_for_the_largest_count_and_listed_for_all():
    result = mrl_plan(RECIPE, "--cluster", "h100", "job.nodes=4-8", "placement.training.pp=2")
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert lines[0].endswith("colocated, 4-8 nodes, drawn for 8 x 8 GPUs = 64 ranks")
    assert [line.partition(";")[0] for line in lines if " dp " in line and "ranks;" in line] == [
        "8 nodes dp 4, 64 ranks",
        "6 nodes dp 3, 48 ranks",
        "4 nodes dp 2, 32 ranks",
    ]
    assert "others the next smaller count is used, and the rest is spare" in lines


def test_a_long_range_is_folded():
    lines = [line.split(";")[0].strip() for line in mrl_plan(RECIPE, "job.nodes=2-64").output.splitlines()]
    at = lines.index("... 59 more counts")
    assert lines[at - 3] == "64 nodes dp 64, 512 ranks" and lines[at + 1] == "2 nodes dp 2, 16 ranks"


def test_the_json_has_the_plans_for_fewer_nodes():
    record = json.loads(mrl_plan(RECIPE, "job.nodes=6-8", "--json").output)
    assert (record["nodes"], record["smaller"]) == (8, [7, 6])
    seven, six = record["alternatives"]
    assert (seven["nodes"], seven["training"]["dp"], seven["inference"]["replicas"]) == (7, 7, 7)
    assert six["batch"]["prompts_per_replica"] == [10, 11]


def test_memory_is_checked_for_the_fewest_nodes_of_a_range():
    larger = ("job.nodes=4-8", "training.tokens_per_microbatch=30000", "placement.offload=buffers")
    (warning,) = warnings(json.loads(mrl_plan(RECIPE, "--cluster", "h100", *larger, "--json").output))
    assert warning.startswith("with 4 nodes one colocated GPU needs about")


ELSEWHERE = ("rich", "torch", "submitit", "asyncio", "ctypes", "launcher.plan.nearest")


@pytest.mark.parametrize(
    ("program", "unneeded"),
    [
        ("import launcher.plan.summary, launcher.cli.plan", ("jinja2", "launcher.job")),
        (
            "from launcher.cli.mrl_submit import main\n"
            f"main(['{RECIPE}', '--cluster=h100', '--dry-run'], standalone_mode=False)",
            (
                *("launcher.job.run_directory", "launcher.backends.slurm", "launcher.host.record.identity"),
                *("launcher.runs.find", "launcher.runs.owner", "launcher.runs.state"),
            ),
        ),
    ],
    ids=["planning", "a dry run"],
)
def test_a_dry_run_imports_only_what_it_shows(program, unneeded):
    look = f"import sys\n{program}\nprint(sorted({set(ELSEWHERE + unneeded)} & set(sys.modules)), file=sys.stderr)"
    run = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, timeout=60, check=True)
    assert run.stderr.splitlines()[-1] == "[]"
