"""A recipe of another user sets values, and names code and secrets only with --trust: no dry run executes any of it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from launcher.cli.main import main
from launcher.cli.mrl_submit import main as mrl_submit
from launcher.errors import BadInput
from launcher.recipe.load import load_recipe

NOBODY = 65534
REWARD = "import pathlib\npathlib.Path('{made}').touch()\n\ndef loss(*_):\n    return 0.0\n\n\n"
REWARD += "def reward(response, **_):\n    return 0.0\n"
MEMBER = "environment: {name: multi-task, args: {environments: [{name: %s, args: {%s, %s: {path: rows.jsonl}}}]}}"
VLLM = "{nodes: 1, %svllm: {args: {compilation_config: 1}}}"
JUDGE = "name: judge, args: {train: {path: rows.jsonl}"
CODE = {
    "grpo.policy_loss": "grpo: {policy_loss: 'own.py:loss'}",
    "code.include.0": "code: {include: [.]}",
    "image.reference": "image: {reference: 'registry.example.org#image'}",
    "notify.command": "notify: {command: [sh, -c, touch made]}",
    "environment.args.environments.0.args.command": MEMBER % ("program", "command: [sh]", "problems"),
    "environment.args.environments.0.args.file": MEMBER % ("python", "file: own.py", "train"),
    "harvest.sbatch": "harvest: {partition: idle, max_replicas: 1, sbatch: [--container-image=their+image]}\n"
    "placement: {mode: partitioned, inference: {nodes: 1}}",
    "inference.vllm.python": "inference: {engine: vllm, vllm: {python: ./python}}",
    "inference.vllm.args.compilation_config": "inference: {engine: vllm, vllm: {args: {compilation_config: 1}}}",
    "distill.replicas.vllm.args.compilation_config": "grpo: {dynamic_sampling: {enabled: false}}\n"
    f"distill: {{teacher: a/vllm, replicas: {VLLM % 'engine: vllm, '}}}",
    "reward.replicas.vllm.args.compilation_config": f"environment: {{{JUDGE}, reward_model: {{}}}}}}\n"
    f"reward: {{model: a/vllm, replicas: {VLLM % ''}}}",
}
SECRETS = {
    "logging.mlflow.uri": "logging: {mlflow: {experiment: e, uri: 'https://example.org'}}",
    "logging.trackio.server": "logging: {trackio: {project: p, server: 'http://example.org:7860'}}",
    "environment.args.judge.token_file": f"environment: {{{JUDGE}, "
    "judge: {url: 'http://example.org/v1', model: m, token_file: ~/.netrc}}}",
    "environment.args.reward_model.token_variable": f"environment: {{{JUDGE}, "
    "reward_model: {url: 'http://example.org', model: m, token_variable: HF_TOKEN}}}",
    "distill.server.token_variable": "distill: {teacher: a/b, server: {urls: 'http://example.org/v1', model: m, "
    "token_variable: HF_TOKEN}}",
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


def refusal(asked: str, key: str) -> str:
    with pytest.raises(BadInput) as refused:
        load_recipe(asked)
    (found,) = [one for one in refused.value.problems if f" {key}: " in one]
    return found


def test_a_recipe_of_another_user_that_sets_values_is_read(folder: Path) -> None:
    assert load_recipe(recipe(folder, "extends: demo\ngrpo: {group_size: 8}")).config.grpo.group_size == 8


@pytest.mark.parametrize("key", CODE)
def test_code_that_it_names_is_refused_with_its_place(folder: Path, key: str) -> None:
    asked = recipe(
        folder, f"extends: {'qwen2.5-3b-dapo' if 'vllm' in key or 'harvest' in key else 'demo'}\n{CODE[key]}"
    )
    found = refusal(asked, key)
    assert found.startswith(("theirs.yaml:2: ", "theirs.yaml:3: "))
    assert "would run as you, and theirs.yaml belongs to nobody: read it" in found
    load_recipe(asked, trusted=True)


@pytest.mark.parametrize("key", SECRETS)
def test_none_of_its_servers_gets_a_secret(folder: Path, key: str) -> None:
    asked = recipe(folder, f"extends: demo\n{SECRETS[key]}")
    assert re.search("would (send a secret of yours to the server|get your tracker's token)", refusal(asked, key))
    load_recipe(asked, trusted=True)


def test_an_option_of_theirs_beside_one_of_yours_is_refused(folder: Path) -> None:
    vllm = "inference: {engine: vllm, vllm: {args: {compilation_config: 1}}}"
    whole = f"{load_recipe('demo').text}\n{vllm}"
    base = recipe(folder, whole, "base.yaml")
    fitting = "resume: {partial: keep}\nmodel: {num_attention_heads: 2, num_query_groups: 1}"
    mine = f"extends: {base}\nname: mine\n{fitting}\ninference: {{vllm: {{args: {{swap_space: 4}}}}}}"
    found = refusal(recipe(folder, mine, "mine.yaml", owner=0), "inference.vllm.args.compilation_config")
    assert found.startswith("base.yaml:")


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


@pytest.mark.parametrize("command", ["plan", "doctor", "prefetch", "rehearse"])
def test_a_command_that_refuses_it_takes_the_option_that_its_error_names(folder: Path, command: str) -> None:
    asked = recipe(folder, f"extends: demo\n{CODE['grpo.policy_loss']}")
    refused = CliRunner().invoke(main, [command, asked])
    assert (refused.exit_code, "give --trust" in refused.output) == (2, True), refused.output
    assert "belongs to" not in CliRunner().invoke(main, [command, asked, "--trust", "job.nodes=0"]).output
