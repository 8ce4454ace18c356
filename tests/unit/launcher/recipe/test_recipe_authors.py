"""A recipe of another user sets values, and names code only with --trust: not even a dry run executes any of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from launcher.cli.main import main
from launcher.cli.mrl_submit import main as mrl_submit
from launcher.errors import BadInput
from launcher.recipe.load import load_recipe

NOBODY = 65534
REWARD = "import pathlib\npathlib.Path('{made}').touch()\n\ndef loss(*_):\n    return 0.0\n"
CODE = {
    "grpo.policy_loss": "grpo: {policy_loss: 'own.py:loss'}",
    "code.include.0": "code: {include: [.]}",
    "image.reference": "image: {reference: /shared/image.sqsh}",
    "inference.vllm.python": "inference: {engine: vllm, vllm: {python: ./python}}",
    "inference.vllm.args": "inference: {engine: vllm, vllm: {args: {compilation_config: 1}}}",
}

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MRL_CLUSTERS", "")
    (tmp_path / "own.py").write_text(REWARD.format(made=tmp_path / "made"))
    return tmp_path


def recipe(folder: Path, text: str, name: str = "theirs.yaml", owner: int = NOBODY) -> str:
    (folder / name).write_text(text + "\n")
    os.chown(folder / name, owner, owner)
    return name


def test_a_recipe_of_another_user_that_sets_values_is_read(folder: Path) -> None:
    assert load_recipe(recipe(folder, "extends: demo\ngrpo: {group_size: 8}")).config.grpo.group_size == 8


@pytest.mark.parametrize("key", CODE)
def test_code_that_it_names_is_refused_with_its_place(folder: Path, key: str) -> None:
    asked = recipe(folder, f"extends: {'qwen2.5-3b-dapo' if 'vllm' in key else 'demo'}\n{CODE[key]}")
    with pytest.raises(BadInput) as refused:
        load_recipe(asked)
    (found,) = [one for one in refused.value.problems if f" {key}: " in one]
    assert found.startswith("theirs.yaml:2: ")
    assert "would run as you, and theirs.yaml belongs to nobody: read it" in found
    load_recipe(asked, trusted=True)


def test_who_names_the_code_counts_and_not_whose_it_is(folder: Path) -> None:
    os.chown(folder / "own.py", NOBODY, NOBODY)
    load_recipe(recipe(folder, f"extends: demo\n{CODE['grpo.policy_loss']}", owner=0))
    theirs = recipe(folder, "extends: demo\ngrpo: {group_size: 8}")
    load_recipe(theirs, [f"grpo.policy_loss={folder}/own.py:loss"])
    whole = load_recipe("demo").text.replace("grpo:", "grpo:\n  policy_loss: own.py:loss", 1)
    base = recipe(folder, whole, "base.yaml")
    with pytest.raises(BadInput, match=r"base\.yaml:\d+: grpo\.policy_loss: .* base\.yaml belongs to"):
        load_recipe(recipe(folder, f"extends: {base}\nname: mine", "mine.yaml", owner=0))


def test_a_recipe_that_all_users_can_write_is_another_users(folder: Path) -> None:
    asked = recipe(folder, f"extends: demo\n{CODE['grpo.policy_loss']}", owner=0)
    (folder / asked).chmod(0o666)
    with pytest.raises(BadInput, match=r"all users can write theirs\.yaml"):
        load_recipe(asked)


def test_no_command_runs_its_code(folder: Path) -> None:
    asked = recipe(folder, f"extends: demo\n{CODE['grpo.policy_loss']}")
    for program, words in ((mrl_submit, [asked, "--dry-run"]), (mrl_submit, [asked]), (main, ["rows", asked])):
        done = CliRunner().invoke(program, words)
        assert (done.exit_code, "belongs to nobody" in done.output) == (2, True), done.output
    assert not (folder / "made").exists()
