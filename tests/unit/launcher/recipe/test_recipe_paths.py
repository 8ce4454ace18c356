"""Paths of a recipe become absolute, starting from the file that gives them."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.errors import BadInput
from launcher.job.evaluation_request import origin_of, requested
from launcher.recipe.load import dump_resolved, load_recipe
from launcher.recipe.paths import named_paths
from launcher.recipe.shipped import SHIPPED, shipped_recipes
from megatron_rl.contract.paths import RunDir
from megatron_rl.recipe.registry import required_extras

RECIPE = """\
name: mine
job: {nodes: 1, gpus_per_node: 1, device: cpu}
model:
  num_layers: 1
  hidden_size: 16
  ffn_hidden_size: 16
  num_attention_heads: 2
  num_query_groups: 1
  max_position_embeddings: 64
  init: checkpoint
  checkpoint: runs/a/checkpoints/step-000040
tokenizer: {type: huggingface, path: tokenizer}
environment:
  name: math
  args:
    train: {path: train.jsonl}
    evaluate: {hub: {path: org/never-here}, near: {path: ../near.jsonl}, linked: {path: link.jsonl}}
inference:
  engine: native
code: {include: [code]}
sampling: {max_new_tokens: 8}
optimizer: {learning_rate: 1e-3}
training: {steps: 1}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory of a recipe and its files; the current directory has files of the same names."""
    for name in ("recipes", "elsewhere"):
        (tmp_path / name / "tokenizer").mkdir(parents=True)
        (tmp_path / name / "train.jsonl").touch()
    (tmp_path / "recipes" / "link.jsonl").symlink_to(tmp_path / "elsewhere" / "train.jsonl")
    (tmp_path / "near.jsonl").touch()
    (tmp_path / "recipes" / "mine.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def test_relative_paths_begin_at_the_recipes_file(folder):
    found = {".".join(one.key): one.value for one in named_paths(load_recipe("../recipes/mine.yaml").config)}
    recipes = folder / "recipes"
    assert found == {
        "model.checkpoint": f"{recipes}/runs/a/checkpoints/step-000040",
        "tokenizer.path": f"{recipes}/tokenizer",
        "environment.args.train.path": f"{recipes}/train.jsonl",
        "environment.args.evaluate.hub.path": "org/never-here",
        "environment.args.evaluate.near.path": f"{folder}/near.jsonl",
        "environment.args.evaluate.linked.path": f"{recipes}/link.jsonl",  # a node may have it lead elsewhere
        "code.include.0": f"{recipes}/code",
        "grpo.baseline": "group",
        "grpo.policy_loss": "clip",
    }


def test_paths_of_an_override_begin_at_the_current_directory(folder):
    overrides = ["tokenizer.path=./tokenizer", "environment.args.train.path=train.jsonl", "model.checkpoint=~/step"]
    config = load_recipe("../recipes/mine.yaml", overrides).config
    assert config.tokenizer.path == f"{folder}/elsewhere/tokenizer"
    assert config.environment.args["train"]["path"] == f"{folder}/elsewhere/train.jsonl"
    assert config.environment.args["evaluate"]["near"]["path"] == f"{folder}/near.jsonl"
    assert config.model.checkpoint == f"{folder}/home/step"


@pytest.mark.parametrize(
    ("name", "key", "more"),
    [
        ("python", "train", "file: reward.py"),
        ("judge", "train", "judge: {url: 'http://node:1/v1', model: m}"),
        *((name, "train", "") for name in ("countdown", "math", "gsm8k", "code")),
        ("program", "problems", "command: ['true']"),
    ],
)
def test_a_path_alone_is_a_data_set_in_every_environment(folder, name, key, more):
    (folder / "elsewhere" / "reward.py").write_text("def reward(response, **columns): return 0\n")
    given = ", ".join(filter(None, [more, f"{key}: missing.jsonl"]))
    config = load_recipe("demo", [f"environment={{name: {name}, args: {{{given}}}}}"]).config
    assert config.environment.args[key] == {"path": f"{folder}/elsewhere/missing.jsonl"}
    assert not required_extras(config.environment) or name in ("math", "gsm8k")


@pytest.mark.parametrize(
    ("name", "file"),
    [("a.jsonl", True), ("a/b.csv.gz", True), ("a/b.parquet", True), ("a/b/c", True), ("a/b", False), ("a", False)],
)
def test_a_name_that_can_only_be_a_file_is_one_though_it_is_missing(folder, name, file):
    path = load_recipe("demo-supervised", [f"data.path={name}"]).config.data.path
    assert path == (f"{folder}/elsewhere/{name}" if file else name)


def test_paths_of_a_file_of_environments_begin_at_that_file(folder):
    (folder / "lists").mkdir()
    (folder / "lists" / "mine.jsonl").touch()
    (folder / "lists" / "both.yaml").write_text(
        "- {name: math, args: {train: {path: mine.jsonl}}}\n- {agent_type: MathAgent, id: theirs, "
        "agent_args: {dataset_file: ./mine.jsonl}}\n"
    )
    recipe = (folder / "recipes" / "mine.yaml").read_text()
    before, _, after = recipe.partition("environment:\n")
    after = after[after.index("inference:") :]
    (folder / "recipes" / "mine.yaml").write_text(f"{before}environments: ../lists/both.yaml\n{after}")
    config = load_recipe("../recipes/mine.yaml").config
    assert [one.args["train"]["path"] for one in config.environments] == [f"{folder}/lists/mine.jsonl"] * 2


def test_paths_of_servers_and_images_become_absolute(folder):
    server = "{urls: 'http://a/v1', model: wise, token_file: ~/token}"
    overrides = [f"distill={{teacher: Qwen/Never, server: {server}}}", "image.reference=./ranks.sqsh"]
    config = load_recipe("../recipes/mine.yaml", overrides).config
    assert config.distill.server.token_file == f"{folder}/home/token"
    assert config.image.reference == f"{folder}/elsewhere/ranks.sqsh"
    named = load_recipe("../recipes/mine.yaml", ["image.reference=nvcr.io#nvidia/pytorch:25.06-py3"]).config
    assert named.image.reference == "nvcr.io#nvidia/pytorch:25.06-py3"


@pytest.mark.parametrize("value", ["''", "~nobody-has-this-name/data", '"a\\0b"'])
def test_an_invalid_path_is_an_error_with_its_place(folder, value):
    with pytest.raises(BadInput, match=r"override .*: model\.checkpoint: .* is not a path: "):
        load_recipe("../recipes/mine.yaml", [f"model.checkpoint={value}"])


def test_an_evaluation_from_anywhere_uses_the_files_of_the_run(folder, monkeypatch):
    run = RunDir(folder / "w3" / "runs" / "a")
    run.root.mkdir(parents=True)
    run.resolved.write_text(dump_resolved(load_recipe("../recipes/mine.yaml").config))
    origin = origin_of("../w3/runs/a")
    assert origin is not None
    asked = {"checkpoint": str(run.root)}
    evaluation = requested(origin, None, ["evaluate.near.path=train.jsonl"], {}, asked)
    assert origin.config.tokenizer.path == f"{folder}/recipes/tokenizer"
    assert evaluation.environment.args["train"]["path"] == f"{folder}/recipes/train.jsonl"
    assert evaluation.environment.args["evaluate"]["near"]["path"] == f"{folder}/elsewhere/train.jsonl"


def test_a_shipped_recipe_names_files_that_come_with_it_and_files_in_the_current_directory(folder):
    found = {
        name: {one.path for one in named_paths(load_recipe(name).config) if one.path is not None}
        for name in shipped_recipes()
    }
    checkpoint = "runs/smollm2-135m-chain-sum/checkpoints/step-000060"
    program = {SHIPPED / "programs" / name for name in ("stock.py", "stock.jsonl", "stock-examples.jsonl")}
    assert {name: paths for name, paths in found.items() if paths} == {
        "demo-distilled": {folder / "elsewhere" / "runs/demo-supervised/checkpoints/step-000300"},
        "demo-program": program,
        "smollm2-135m-chain-sum-hard": {folder / "elsewhere" / checkpoint},
    }
    assert all(path.is_file() for path in program)


def test_variable_at_the_beginning_of_a_path_is_expanded_as_a_tilde_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for written in ("$HOME/v/file", "${HOME}/v/file", "~/v/file"):
        assert load_recipe("demo-supervised", [f"data.path={written}"]).config.data.path == "/home/me/v/file"
    monkeypatch.delenv("NOT_SET", raising=False)
    with pytest.raises(BadInput, match=r"data\.path.*the variable NOT_SET is not set"):
        load_recipe("demo-supervised", ["data.path=$NOT_SET/file"])
