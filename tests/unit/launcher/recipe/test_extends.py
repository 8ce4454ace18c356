"""Recipes that extend another one: merging, errors, and the origin of each value."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from launcher.errors import BadInput
from launcher.recipe.load import asked_text, dump_resolved, load_recipe, origins, place_of
from launcher.recipe.shipped import shipped_bases, shipped_recipes
from launcher.recipe.written import read_files

MINE = """\
extends: qwen2.5-3b-dapo
name: mine
grpo: {prompts_per_step: 32, global_batch: 512}
environment:
  args: {train: {path: mine.jsonl}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Parent of a directory of recipes and of the current directory."""
    for name in ("recipes", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text(MINE)
    (tmp_path / "recipes" / "mine.jsonl").touch()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path


def write(folder: Path, name: str, text: str) -> str:
    (folder / "recipes" / name).write_text(text)
    return f"../recipes/{name}"


def problem(asked: str, *overrides: str) -> str:
    with pytest.raises(BadInput) as refused:
        load_recipe(asked, overrides)
    (found,) = refused.value.problems
    return found


def test_mappings_merge_and_values_of_the_extending_file_win(folder):
    config, base = load_recipe("../recipes/mine.yaml").config, load_recipe("qwen2.5-3b-dapo").config
    assert (config.name, config.grpo.prompts_per_step, config.grpo.group_size) == ("mine", 32, 16)
    assert config.environment.args["train"]["path"] == f"{folder}/recipes/mine.jsonl"
    assert config.environment.args["train"]["answer"] == base.environment.args["train"]["answer"]
    assert config.model == base.model
    assert "extends" not in yaml.safe_load(dump_resolved(config))


def test_paths_of_an_extended_file_begin_at_that_file(folder):
    (folder / "recipes" / "base").mkdir()
    demo = (
        load_recipe("demo")
        .text.replace("name: arithmetic", "name: python")
        .replace("args: {}", "args: {file: reward.py, train: sums.jsonl}")
    )
    (folder / "recipes" / "base" / "base.yaml").write_text(demo)
    (folder / "recipes" / "base" / "reward.py").write_text("def reward(response, **columns): return 0.0\n")
    asked = write(folder, "own.yaml", "extends: base/base.yaml\nenvironment: {args: {train: mine.jsonl}}\n")
    arguments = load_recipe(asked).config.environment.args
    assert arguments["file"] == f"{folder}/recipes/base/reward.py"
    assert arguments["train"] == {"path": f"{folder}/recipes/mine.jsonl"}


def test_another_environment_replaces_the_section_of_the_base(folder):
    asked = write(folder, "own.yaml", "extends: qwen2.5-3b-dapo\nenvironment: {name: arithmetic}\n")
    environment = load_recipe(asked).config.environment
    assert (environment.name, environment.args) == ("arithmetic", {})


def test_an_override_with_another_environment_replaces_the_section_too(folder):
    named = "environment.name=gsm8k"
    for overrides in ([named, "environment.args.held_out=0.1"], ["environment.args.held_out=0.1", named]):
        found = load_recipe("qwen2.5-3b-dapo", overrides)
        assert found.config.environment is not None
        assert found.config.environment.args == {"held_out": 0.1}, "and not the data of the base"
    same = load_recipe("qwen2.5-3b-dapo", ["environment.name=math"]).config
    assert same == load_recipe("qwen2.5-3b-dapo").config


def test_an_error_names_the_file_that_holds_the_value(folder):
    asked = write(folder, "own.yaml", MINE.replace("prompts_per_step: 32", "prompts_per_step: many"))
    assert problem(asked) == f"{asked}:3: grpo.prompts_per_step: expected an integer > 0, got 'many'"
    base = write(folder, "base.yaml", load_recipe("demo").text.replace("group_size: 16", "group_size: 1"))
    lines = (folder / "recipes" / "base.yaml").read_text().splitlines()
    line = 1 + next(number for number, text in enumerate(lines) if "group_size: 1 " in text)
    asked = write(folder, "own.yaml", "extends: base.yaml\ngrpo: {prompts_per_step: 8}\n")
    assert problem(asked) == f"{base}:{line}: grpo.group_size: expected an integer >= 2, got 1"


@pytest.mark.parametrize(
    ("extends", "said"),
    [
        ("qwen2.5-3b", "no shipped recipe is called 'qwen2.5-3b'; did you mean qwen2.5-3b-dapo?; or give a path"),
        ("nothere.yaml", "../recipes/nothere.yaml: cannot be read: No such file or directory"),
        ("[dapo]", "expected the name of a shipped recipe or the path of a file, got ['dapo']"),
        ("null", "expected the name of a shipped recipe or the path of a file, got None"),
        ("own.yaml", "own.yaml itself extends own.yaml"),
        ("mine.yaml", "mine.yaml itself extends qwen2.5-3b-dapo"),
    ],
)
def test_an_invalid_extends_is_refused_with_its_line(folder, extends, said):
    asked = write(folder, "own.yaml", f"name: own\nextends: {extends}\n")
    found = problem(asked)
    assert found.startswith(f"{asked}:2: extends: ")
    assert said in found


def test_the_origin_of_each_value_is_known(folder):
    recipe = load_recipe("../recipes/mine.yaml", ["training.seed=3"])
    found = {key: str(origin) for key, origin in origins(recipe).items()}
    assert found["training.seed"] == "override"
    assert found["grpo.prompts_per_step"] == "../recipes/mine.yaml:3"
    assert found["model.huggingface"].startswith("qwen2.5-3b-dapo.yaml:")
    assert found["optimizer.beta2"].startswith("bases/dapo.yaml:")
    assert (found["model.hidden_size"], found["tokenizer.path"]) == ("models.yaml", "model.huggingface")
    assert "optimizer.max_nonfinite_updates" not in found
    assert place_of(recipe, "save.every") == found["save.every"]


def test_recipe_yaml_keeps_the_text_of_extended_files(folder):
    text = asked_text(load_recipe("../recipes/mine.yaml"))
    assert text.startswith(MINE)
    assert "# extended: qwen2.5-3b-dapo.yaml\n# # DAPO's problems" in text
    assert "# extended: bases/dapo.yaml\n" in text
    assert yaml.safe_load(text) == yaml.safe_load(MINE)


def test_a_base_is_extended_and_not_run():
    assert shipped_bases() == ["dapo", "gsm8k"]
    assert problem("dapo").startswith("no recipe is called 'dapo'")
    extending = [name for name in shipped_recipes() if name.endswith(("-dapo", "-partitioned"))]
    assert len(extending) == 15
    assert {read_files(name).values["optimizer"]["epsilon"] for name in extending} == {1e-8}


def test_another_model_drops_the_shape_of_the_base(folder):
    text = "extends: smollm2-135m-chain-sum\nmodel: {huggingface: Qwen/Qwen2.5-3B}\n"
    recipe = load_recipe(write(folder, "own.yaml", text))
    assert (recipe.config.model.num_layers, recipe.config.tokenizer.path) == (36, "Qwen/Qwen2.5-3B")
    assert str(origins(recipe)["model.num_layers"]) == "models.yaml"
    assert origins(recipe)["model.dtype"].source == "smollm2-135m-chain-sum.yaml"


def test_lists_are_replaced(folder):
    asked = write(folder, "few.yaml", MINE.replace("path: mine.jsonl", "remove: [mine]"))
    assert load_recipe(asked).config.environment.args["train"]["remove"] == ["mine"]


def test_a_model_from_scratch_has_the_shape_of_the_named_model(folder):
    small = load_recipe("qwen2.5-3b-dapo", ["model.init=from-scratch", "model.num_layers=2"]).config.model
    assert (small.num_layers, small.hidden_size) == (2, 2048)
