"""Rehearsals of recipes at full size by the code of a run, compared with the memory that the plan predicts."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner
from published_configs import PUBLISHED_CONFIGS

from launcher.backends.rehearsal import COMMAND, RehearsedRank, answer, rehearsed_kinds, request
from launcher.cli.rehearse import command
from launcher.cluster.choice import load_clusters
from launcher.plan.gpu_memory import RankMemory, as_rehearsed, rank_memory
from launcher.plan.memory_terms import CONTEXT_BYTES
from launcher.plan.parameters import tokens_known, weights
from launcher.plan.summary import gpu_bytes, make_plan
from launcher.recipe.load import load_recipe
from launcher.recipe.shipped import shipped_recipes
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.teacher_files import teacher_files

pytestmark = pytest.mark.slow

Rehearse = Callable[..., list[tuple[RehearsedRank, RankMemory]]]

LAYOUTS = {
    "32b: nothing computed again": ("qwen2.5-32b-dapo", "training.recompute=none"),
    "32b: layers computed again": ("qwen2.5-32b-dapo", "training.recompute=full"),
    "32b: stages": ("qwen2.5-32b-dapo", "placement.training.tp=4", "placement.training.pp=2"),
    "3b: whole": ("qwen2.5-3b-dapo", "placement.training.tp=1", "placement.training.sequence_parallel=false"),
    "3b: norms on all ranks": ("qwen2.5-3b-dapo", "placement.training.sequence_parallel=false"),
    "3b: a reference": ("qwen2.5-3b-dapo", "grpo.kl_beta=0.1"),
    "3b: nothing leaves": ("qwen2.5-3b-dapo", "placement.offload=none"),
    "32b: gradients in bf16": ("qwen2.5-32b-dapo", "optimizer.grad_reduce_in_fp32=false"),
    "3b: Adam's state leaves": ("qwen2.5-3b-dapo", "placement.offload=optimizer"),
    "3b: a vLLM on the GPU": ("qwen2.5-3b-dapo", "inference.engine=vllm"),
    "3b: weights leave for a vLLM": (
        "qwen2.5-3b-dapo",
        "inference.engine=vllm",
        "placement.offload=optimizer",
        "grpo.kl_beta=0.1",
    ),
}
LARGER = {
    "Kimi-K2": (
        "deepseek-v3.1-dapo",
        "moonshotai/Kimi-K2-Instruct",
        "job.nodes=96",
        "placement.training.ep=16",
        "placement.inference.dp=8",
        "placement.inference.ep=64",
    ),
    "GLM-4.5": (
        "glm-4.5-air-dapo",
        "zai-org/GLM-4.5",
        "job.nodes=24",
        "placement.training.tp=8",
        "placement.training.pp=4",
        "placement.inference.nodes=8",
        "placement.inference.dp=2",
        "placement.inference.ep=16",
        "inference.max_batch=64",
    ),
}
"""Models without a recipe: the recipe of a smaller one, the published model, and the changes that docs/weights.md
names."""
NORMAL = ("qwen2.5-32b-dapo-partitioned", "demo-program")


@pytest.fixture(scope="module")
def rehearsed() -> Iterator[Rehearse]:
    """(recipe, overrides) -> rehearsal and planned memory of a rank of each kind. One process imports torch for all."""
    with subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        ask, answers = process.stdin, process.stdout

        def rehearse(recipe: str, *overrides: str) -> list[tuple[RehearsedRank, RankMemory]]:
            asked = load_recipe(recipe, overrides)
            config, sizes = asked.config, make_plan(asked, None).sizes
            tokens = tokens_known(config)
            assert tokens is not None
            found = []
            for kind in rehearsed_kinds(config, sizes):
                ask.write(request(config, tokens, kind))
                ask.flush()
                vocab = config.model.padded_vocab_size(tokens)
                memory = rank_memory(as_rehearsed(config), sizes, vocab, kind.role, kind.stage)
                found.append((answer(kind, answers.readline()), memory))
            return found

        try:
            yield rehearse
        finally:
            process.kill()


def test_rehearse_reports_the_memory_of_each_rank_in_every_phase() -> None:
    result = CliRunner().invoke(command, ["demo", "--json"])
    assert result.exit_code == 0, result.output
    (rank,) = json.loads(result.output)["ranks"]
    assert json.loads(result.output)["fits"] is True
    assert list(rank) == ["role", "stage", "parameters", "peak_bytes", "phases", "planned_bytes", "needed_bytes"]
    parameters = weights(load_recipe("demo").config.model, 16).all
    assert (rank["role"], rank["stage"], rank["parameters"]) == ("colocated", 0, parameters)
    assert list(rank["phases"]) == ["build", "generate", "score", "train", "update"]
    for phase in rank["phases"].values():
        assert phase["bytes"] == sum(phase["held_by"].values()) <= rank["peak_bytes"]
        assert phase["held_by"]["weights"] >= 4 * rank["parameters"]
    assert rank["peak_bytes"] == max(phase["bytes"] for phase in rank["phases"].values())
    assert rank["needed_bytes"] == rank["peak_bytes"], "a CPU has no contexts"
    assert rank["planned_bytes"] == pytest.approx(rank["peak_bytes"], rel=0.1), "a rank has half of the answers"


@pytest.mark.slow
def test_environments_with_their_own_algorithms_are_rehearsed() -> None:
    own = "{name: arithmetic, id: own, grpo: {kl_beta: 0.1, importance: {level: sequence, upper: 2.0}}}"
    listed = f"environments=[{own}, {{name: arithmetic, id: plain}}]"
    result = CliRunner().invoke(command, ["demo", "environment=null", listed, "--json"])
    assert result.exit_code == 0, result.output
    (rank,) = json.loads(result.output)["ranks"]
    assert list(rank["phases"]) == ["build", "generate", "score", "train", "update"]
    assert rank["phases"]["score"]["held_by"]["reference"] > 0
    assert rank["planned_bytes"] == pytest.approx(rank["peak_bytes"], rel=0.1)


def test_environments_with_teachers_and_divergences_are_rehearsed() -> None:
    divergence = "distill: {divergence: {kind: js, top_k: 4}}"
    listed = f"environments=[{{name: arithmetic, id: whole}}, {{name: arithmetic, id: top, {divergence}}}]"
    taught = ("environment=null", listed, "distill={teacher: policy, divergence: {kind: forward}}")
    result = CliRunner().invoke(command, ["demo", *taught, "--json"])
    assert result.exit_code == 0, result.output
    (rank,) = json.loads(result.output)["ranks"]
    assert list(rank["phases"]) == ["build", "generate", "score", "train", "update"]


@pytest.mark.slow
def test_a_teacher_takes_part_on_the_training_ranks_and_on_its_replicas(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": 16, "hidden_act": "silu"}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"], **shape}))

    def rehearsed(*overrides: str) -> dict[str, Any]:
        result = CliRunner().invoke(command, ["demo", f"distill.teacher={tmp_path}", *overrides, "--json"])
        assert result.exit_code == 0, result.output
        return {rank["role"]: rank for rank in json.loads(result.output)["ranks"]}

    held = weights(teacher_files(tmp_path).model, 16).all * 4
    beside = rehearsed()["colocated"]
    assert beside["phases"]["train"]["held_by"]["teacher"] == pytest.approx(held, rel=0.02)
    whole = rehearsed("distill.divergence.kind=js")["colocated"]
    assert whole["phases"]["train"]["bytes"] > beside["phases"]["train"]["bytes"]
    apart = rehearsed("job.nodes=2", "distill.replicas.nodes=1")
    assert "teacher" not in apart["colocated"]["phases"]["train"]["held_by"]
    assert list(apart["teacher"]["phases"]) == ["build", "score"]
    assert apart["teacher"]["phases"]["score"]["held_by"]["weights"] == pytest.approx(held, rel=0.02)


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(name, marks=() if name in NORMAL else pytest.mark.slow) for name in shipped_recipes()],
)
def test_shipped_recipe_needs_the_planned_memory_and_fits(rehearsed: Rehearse, recipe: str) -> None:
    config = load_recipe(recipe).config
    limit = gpu_bytes(config, load_clusters().choose_profile("h100", None)[1])
    for rank, planned in rehearsed(recipe):
        assert rank.failure is None
        as_planned(rank, planned, on_cpu=limit is None)
        assert limit is None or rank.peak_bytes + CONTEXT_BYTES < limit, rank


@pytest.mark.slow
@pytest.mark.parametrize("asked", LAYOUTS.values(), ids=LAYOUTS)
def test_other_layouts_need_the_planned_memory(rehearsed: Rehearse, asked: tuple[str, ...]) -> None:
    for rank, planned in rehearsed(*asked):
        assert rank.failure is None
        as_planned(rank, planned)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "model", "changes"), [(*each[:2], each[2:]) for each in LARGER.values()], ids=LARGER
)
def test_larger_models_fit_as_planned(
    rehearsed: Rehearse, tmp_path: Path, recipe: str, model: str, changes: tuple[str, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED_CONFIGS[model]))
    limit = gpu_bytes(load_recipe(recipe).config, load_clusters().choose_profile("h100", None)[1])
    for rank, planned in rehearsed(recipe, f"model.huggingface={tmp_path}", *changes):
        assert rank.failure is None
        as_planned(rank, planned)
        assert limit is not None and planned.total < limit


def as_planned(rank: RehearsedRank, planned: RankMemory, on_cpu: bool = False) -> None:
    """Check every planned phase to 5 %, except a build that is not the peak: its own moment peak depends on the
    number of experts. A rehearsal decodes one token, records no decode graphs, and has the choices of experts of two
    micro-batches alone, so the memory of graphs and choices is subtracted. Of a recipe for CPUs only the peak is
    checked, to 10 %: tables of the rows and of the optimizer show beside a tiny model.
    """
    if on_cpu:
        assert planned.fullest.tensors == pytest.approx(rank.peak_bytes, rel=0.1)
        return
    for phase in planned.phases:
        held = sum(rank.phases[phase.name].values())
        if phase.name == "build" and held < max(sum(each.values()) for each in rank.phases.values()):
            continue
        kept = sum(term.bytes for term in phase.terms if term.name in ("decode graphs", "choices"))
        tables = 2**26 if phase.name == "generate" else 0  # of positions, which stay where the weights leave
        assert phase.tensors - kept == pytest.approx(held, rel=0.05, abs=tables), (phase, rank.phases[phase.name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "layers", "experts"),
    [("qwen2.5-3b-dapo", 12, None), ("qwen3-30b-a3b-dapo", 6, 32)],
    ids=["dense", "experts"],
)
def test_memory_of_all_layers_and_experts_is_predicted_from_a_few(
    recipe: str, layers: int, experts: int | None
) -> None:
    """The prediction holds in every phase of a step and for every holder, to the rounding of a buffer. For experts the
    tolerance is the work of a single expert, which has fewer tokens where there are more experts."""
    program = f"""
from unittest import mock
import megatron_rl.model.platform.megatron_core
from launcher.recipe.load import load_recipe
from megatron_rl.run.rehearse import run
experts = {experts}
overrides = ["model.num_layers={layers}"] + ([f"model.num_experts={{experts}}"] if experts else [])
config = load_recipe("{recipe}", overrides).config
with mock.patch.object(run, "few_experts", lambda model, ep: model.num_experts):
    whole = run.rehearse(config, 16, 0, "colocated", 151936, depths=({layers}, {layers}))
few = run.rehearse(config, 16, 0, "colocated", 151936)
assert few["parameters"] == whole["parameters"]
assert list(few["phases"]) == list(whole["phases"])
for name, held in whole["phases"].items():
    if name == "build" and experts:
        continue
    assert held.keys() == few["phases"][name].keys(), (name, held, few["phases"][name])
    for holder, size in held.items():
        off = abs(few["phases"][name][holder] - size)
        assert off <= (2**25 if experts else 2**20), (name, holder, few["phases"][name][holder], size)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr


def with_planted_faults(answers: Connection) -> None:
    """Send the failure that a rehearsal reports for each fault."""
    import torch

    from megatron_rl.generate.engine import row_state
    from megatron_rl.learn.training import objective
    from megatron_rl.model.layers import PackedLayer
    from megatron_rl.run.rehearse.run import rehearse

    config = load_recipe("demo", ["model.num_layers=1"]).config
    too_small = config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": 14})})

    def failure(config: RunConfig = config, vocab: int = 14) -> Any:
        return rehearse(config, 2, 0, "colocated", vocab)["failure"]

    def on_the_cpu(logits: Any, *rest: Any) -> Any:
        return logits.new_zeros(3, 3) + torch.zeros(3, 3)

    def of_another_shape(tokens: Any, *rest: Any) -> Any:
        return tokens.logprobs @ tokens.logprobs[1:], None

    found = []
    with mock.patch.object(row_state, "sample", on_the_cpu):
        found.append(failure())
    with mock.patch.object(objective, "grpo_loss", of_another_shape):
        found.append(failure())
    with mock.patch.object(PackedLayer, "through", lambda *_: 1 / 0):
        found.append(failure())
    found.append(failure(too_small, vocab=10**6))
    answers.send(found)


def test_planted_faults_are_reported_with_phase_and_place() -> None:
    """The faults are planted: a tensor of the wrong device, one of the wrong shape, an error of the code, and a model
    that is too small for its tokenizer."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("forkserver").Process(target=with_planted_faults, args=(theirs,))
    process.start()
    theirs.close()
    device, shape, error, tokens = ours.recv()
    process.join()
    assert device["phase"] == "generate"
    assert "DeviceMismatch" in device["error"] or "devices" in device["error"]
    assert "megatron_rl/generate/engine/row_state.py" in device["where"]
    assert shape["phase"] == "train"
    assert "size" in shape["error"]
    assert "megatron_rl/learn/training/objective.py" in shape["where"]
    # The layers that train run first where answers are scored: generation has its own.
    assert (error["phase"], error["error"]) == ("score", "ZeroDivisionError: division by zero")
    assert tokens["phase"] == "build"
    assert "model.vocab_size 14 is less than" in tokens["error"]
    assert "megatron_rl/model/policy.py" in tokens["where"]
