"""Recipes whose run starts a reward model: what is refused before anything starts, and the plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.cli.show.node_lines import legend, node_lines
from launcher.errors import BadInput
from launcher.fetch.needs import Need, needs
from launcher.job.evaluation_request import checked_environment
from launcher.plan.summary import make_plan, plan_json
from launcher.recipe.load import load_recipe
from megatron_rl.contract.paths import REWARD
from megatron_rl.recipe.config import RunConfig

JUDGED = ("environment={name: judge, args: {train: {path: questions.jsonl}, reward_model: {}}}", "curriculum=null")
PARTITIONED = ("placement.mode=partitioned", "placement.inference.nodes=1", "inference.engine=vllm")
REPLICAS = ("job.nodes=3", "reward={model: some/classifier, replicas: {nodes: 1, tp: 2}}")


def loaded(folder: Path, *overrides: str) -> RunConfig:
    (folder / "questions.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    (folder / "mine.yaml").write_text("extends: demo\n")
    return load_recipe(str(folder / "mine.yaml"), ["model.init=from-scratch", *overrides]).config


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (REPLICAS, r"override 'reward=.*reward is given, and no environment asks it"),
        (JUDGED, r"environment\.args\.reward_model has no url, and the run starts no reward model"),
        ((*JUDGED, *REPLICAS, "job.nodes=3-4"), r"job\.nodes 3-4 is a range, and reward\.replicas needs one number"),
        ((*JUDGED, *REPLICAS, "job.nodes=1"), r"reward\.replicas\.nodes 1 of job\.nodes 1 leaves 1 - 1 = 0 nodes"),
        (
            (*JUDGED, *REPLICAS, *PARTITIONED, "inference.vllm.image=a:b", "reward.replicas.vllm.image=c:d"),
            r"inference\.vllm\.image and reward\.replicas\.vllm\.image are a:b and c:d: a run has one image",
        ),
        (
            ("environment={name: judge, args: {train: {path: questions.jsonl}, reward_model: {model: m}}}",),
            "model is given without url",
        ),
        (
            ("environment={name: judge, args: {train: {path: questions.jsonl}, reward_model: {url: 'http://a'}}}",),
            "url is given without model",
        ),
    ],
)
def test_contradictions_are_refused_with_their_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], error: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=error):
        make_plan_of(tmp_path, *overrides)


def test_an_evaluation_of_environments_of_which_one_asks_the_reward_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its answers would be lost."""
    monkeypatch.chdir(tmp_path)
    judge = "{name: judge, args: {train: {path: questions.jsonl}, reward_model: {}}}"
    several = ("environment=null", f"environments=[{judge}, {{name: arithmetic}}]", "curriculum=null")
    config = loaded(tmp_path, *several, *REPLICAS)
    with pytest.raises(BadInput, match=r"--env: environment 'multi-task' asks .*: choose one .* by --env ID"):
        checked_environment(config.task, "--env")
    assert config.environments is not None
    judged, sums = config.environments
    with pytest.raises(BadInput, match=r"--env: environment 'judge' asks .*: name a server"):
        checked_environment(judged, "--env")
    assert checked_environment(sums, "--env") == sums


def make_plan_of(folder: Path, *overrides: str) -> None:
    loaded(folder, *overrides)
    make_plan(load_recipe(str(folder / "mine.yaml"), ["model.init=from-scratch", *overrides]), None)


def test_the_plan_has_nodes_of_the_reward_model_and_prefetch_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = loaded(tmp_path, *JUDGED, *REPLICAS)
    recipe = load_recipe(str(tmp_path / "mine.yaml"), ["model.init=from-scratch", *JUDGED, *REPLICAS])
    plan = make_plan(recipe, None)
    assert plan_json(config, plan, None)[REWARD] == {"nodes": 1, "ranks": 2, "replicas": 1, "tp": 2}
    assert [line.split()[2:] for line in node_lines(plan)][-1] == ["m0"]
    assert "m: replica of the reward model" in legend(plan)
    assert Need("model", "some/classifier") in needs(config, None)
    assert config.data_parallel_size == 4  # of two nodes with two ranks
