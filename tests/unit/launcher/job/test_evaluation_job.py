"""The job of `mrl evaluate --cluster` has the ranks of one node that its copies of the model need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.cluster.choice import load_clusters
from launcher.errors import BadInput
from launcher.job.evaluation_request import CheckpointRun, job_recipe, refuse_ranks, requested
from launcher.plan.summary import make_plan
from launcher.recipe.load import Recipe, load_recipe
from megatron_rl.contract.paths import CARRIED, RunDir
from megatron_rl.recipe.config import RunConfig


def job_of(tmp_path: Path, recipe: str, **asked: Any) -> Recipe:
    origin = CheckpointRun(RunDir(tmp_path), load_recipe(recipe).config)
    given = {"checkpoint": str(tmp_path), "device": "cuda"} | asked
    job = job_recipe(requested(origin, None, [], {}, given), origin, "h100", [])
    assert job.evaluation
    refuse_ranks(job.evaluation, job.config, load_clusters({}).profile("h100"))
    return job


@pytest.mark.parametrize("grpo", [None, {"kl_beta": 0.1}])
def test_it_has_one_of_several_environments_of_a_run_without_what_is_for_training(tmp_path: Path, grpo: Any) -> None:
    listed = [{"name": "arithmetic", "id": "sums", "grpo": grpo, "args": {"draws": 9}}, {"name": "countdown"}]
    demo = load_recipe("demo").config.model_dump()
    config = RunConfig.model_validate(demo | {"environment": None, "environments": listed})
    origin, given = CheckpointRun(RunDir(tmp_path), config), {"checkpoint": str(tmp_path)}
    environment = requested(origin, "sums", [], {}, given).environment
    assert (environment.name, environment.args) == ("arithmetic", {"draws": 9})
    assert requested(origin, None, [], {}, given).environment == config.task


TRAINING: dict[str, list[str]] = {
    "a reward model": [
        "environment=null",
        "environments=[{name: judge, args: {train: {path: a/set}, reward_model: {}}}, {name: arithmetic}]",
        "reward={model: some/classifier, replicas: {nodes: 1, tp: 2}}",
        "job.nodes=3",
    ],
    "a teacher of an environment": [
        "environment=null",
        "environments=[{name: arithmetic}, {name: countdown, distill: {teacher: policy}}]",
    ],
    "an algorithm of an environment": [
        "environment=null",
        "environments=[{name: arithmetic}, {name: countdown, grpo: {kl_beta: 0.1}}]",
    ],
    "replicas of idle nodes": [
        "placement={mode: partitioned, inference: {nodes: 1}}",
        "job.nodes=2",
        "resume.partial=keep",
        "harvest={partition: idle, max_replicas: 2}",
    ],
    "a profile of ranks": ["profile={steps: [1, 2], ranks: [1]}"],
}


@pytest.mark.parametrize("name", TRAINING)
def test_it_needs_nothing_that_only_training_has(tmp_path: Path, name: str) -> None:
    config = load_recipe("demo", [*TRAINING[name], "curriculum=null"]).config
    origin, given = CheckpointRun(RunDir(tmp_path), config), {"checkpoint": str(tmp_path), "device": "cpu"}
    chosen = "arithmetic" if config.reward else None
    job = job_recipe(requested(origin, chosen, [], {}, given), origin, "h100", [])
    assert make_plan(job, None).nodes == 1


@pytest.mark.parametrize("recipe", ["qwen2.5-32b-dapo", "qwen3-30b-a3b-dapo"])
def test_it_has_a_rank_for_each_part_of_each_copy(tmp_path: Path, recipe: str) -> None:
    job = job_of(tmp_path, recipe, tp=4, replicas=2)
    config, asked = job.config, job.evaluation
    assert (config.job.nodes, config.job.gpus_per_node, config.placement.training.tp) == (1, 8, 4)
    assert asked and (asked.tp, asked.replicas) == (4, 2)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"tp": 4, "replicas": 4}, "--tp 4 --replicas 4: 16 ranks are more than the 8 GPUs of a node"),
        ({"tp": 3}, "--tp 3 does not divide model.num_attention_heads 40"),
        ({"tp": 1, "dtype": "fp32"}, "--tp 1: 122 GiB of weights do not fit in a GPU's 80 GiB"),
    ],
)
def test_what_a_node_cannot_hold_is_refused_by_the_option(tmp_path: Path, asked: dict[str, Any], why: str) -> None:
    with pytest.raises(BadInput) as refused:
        job_of(tmp_path, "qwen2.5-32b-dapo", **asked)
    assert str(refused.value).startswith(why)


def test_converted_weights_have_the_shape_of_the_files_beside_them(tmp_path: Path) -> None:
    carried = tmp_path / CARRIED
    carried.mkdir()
    shape = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    fields = {"num_key_value_heads": 2, "max_position_embeddings": 1024, "vocab_size": 16}
    (carried / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"], **shape, **fields}))
    job = job_recipe(requested(None, "arithmetic", [], {}, {"checkpoint": str(tmp_path)}), None, "h100", [])
    assert (job.config.model.huggingface, job.config.tokenizer.path) == (str(carried), str(carried))
    assert job.config.model.num_layers == 2
