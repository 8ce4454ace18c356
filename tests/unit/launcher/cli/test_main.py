"""Help, lists and suggestions of the commands, and errors for unknown ones."""

from __future__ import annotations

import json
import sys

import pytest
from click import ClickException
from click.testing import CliRunner, Result

from launcher.cli.environments import environment_list
from launcher.cli.main import ALIASES, main
from launcher.cli.mrl_submit import main as mrl_submit
from launcher.cli.show.help_pages import Keys, key_path
from launcher.cli.show.lists import purpose
from launcher.errors import show
from launcher.recipe.shipped import shipped_recipes
from launcher.recipe.written import read_files
from megatron_rl.recipe.registry import EnvironmentInfo
from megatron_rl.recipe.section import flat


def within(*words: str) -> Result:
    """Run mrl in this process; errors look as in a separate process."""
    return CliRunner().invoke(main, words, prog_name="mrl", standalone_mode=False)


@pytest.mark.parametrize(("name", "command"), [("mrl", main), ("mrl-submit", mrl_submit)])
def test_version(name, command):
    said = CliRunner().invoke(command, ["--version"], prog_name=name)
    assert said.exit_code == 0
    assert said.stdout.startswith(f"{name} ")


def test_help_lists_each_command_in_full():
    assert "..." not in within("--help").stdout.partition("Before a run:")[2]


def test_environments_as_data(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)  # two seconds to import; described in test_trial.py
    environments = json.loads(within("environments", "--json").stdout)["environments"]
    assert {"arithmetic", "math"} <= {one["name"] for one in environments}


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("statsu", "did you mean status?"),
        ("stop", "did you mean cancel?"),
        ("list", "did you mean status?"),
        ("submit", "mrl-submit starts a run"),
        ("completion", "click completes: eval "),
        ("zzz", "the commands are attach, cancel"),
    ],
)
def test_an_unknown_command_is_answered_with_a_suggestion(word, said):
    error = within(word).exception
    assert isinstance(error, ClickException)
    assert error.exit_code == 2
    assert error.message.startswith(f"mrl has no command '{word}'; {said}")


def test_an_alias_has_no_line_in_the_list_and_the_help_of_its_option_names_it():
    assert not [name for name in ALIASES if f"\n  {name} " in within("--help").stdout]
    for name, (command, *options) in ALIASES.items():
        said = within(name, "--help").stdout
        assert said == within("help", command).stdout == within("help", name).stdout
        assert all(option in said and f"mrl {name}" in " ".join(said.split()) for option in options)


@pytest.mark.parametrize("words", [(), ("convert",)])
def test_without_arguments_it_lists_the_commands(words):
    said = within(*words)
    assert (said.exit_code, said.exception) == (0, None)
    assert said.stdout.startswith(f"Usage: {' '.join(['mrl', *words])} ") and said.stdout.count("\n") > 10


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--config", "RECIPE is the first argument"),
        ("--optimizer.learning_rate", "without dashes: optimizer.learning_rate=VALUE"),
        ("--folow", "Did you mean --follow?"),
        ("--conflate", "No such option '--conflate'.; see mrl-submit --help"),
    ],
)
def test_an_unknown_option_is_answered_with_a_suggestion_or_none(option, said, capsys):
    error = CliRunner().invoke(mrl_submit, ["demo", option, "1"], prog_name="mrl-submit", standalone_mode=False)
    show(error.exception, as_json=False)
    assert said in capsys.readouterr().err


def test_help_explains_a_key_and_a_section():
    said = within("help", "optimizer.warmup_steps").stdout.splitlines()
    assert said == ["optimizer.warmup_steps: an integer >= 0; default 0", "  Optimizer updates of linear warm-up."]
    said = within("help", "grpo").stdout
    assert (
        said.startswith("grpo: a section\n")
        and "  grpo.group_size: an integer >= 2; default 16\n    Answers per" in said
    )
    assert "In recipes:\n\nresume: a section\n" in within("help", "resume").stdout
    assert "no key grpo.group_sise (did you mean group_size?)" in str(within("help", "grpo.group_sise").exception)


def test_help_knows_every_key_of_shipped_recipes():
    known = Keys().known
    for recipe in shipped_recipes():
        unknown = [
            key
            for key in flat(read_files(recipe).values)
            if key_path(key) not in known and not key.startswith("environment.args.")
        ]
        assert not unknown, recipe


def test_help_is_a_command():
    assert within("help").stdout == within("--help").stdout
    said = within("help", "cancel")
    assert (said.exit_code, said.exception) == (0, None)
    assert said.stdout.startswith("Usage: mrl cancel [OPTIONS] [RUN]")
    assert "mrl has no command 'cancle'; did you mean cancel?" in str(within("help", "cancle").exception)


INSTALLED = [
    EnvironmentInfo("python", "Rows of any data set, scored by a function of yours", "mrl 0.1.0 (a:B)"),
    EnvironmentInfo("reasoning-gym", "A task of reasoning-gym", "mrl 0.1.0 (a:B)"),
    *(EnvironmentInfo(f"reasoning-gym/{name}", f"The task {name}", "mrl 0.1.0 (a:B)") for name in ("ab", "bf")),
    EnvironmentInfo("riddle", "Riddles " * 20, "riddles 2.0 (c:D)"),
]


def test_environments_for_data_of_the_user_come_first_and_variants_are_a_number():
    lines = environment_list(INSTALLED, 80).splitlines()
    assert lines[:4] == [
        "of your own:",
        "  python  Rows of any data set, scored by a function of yours",
        "",
        "with problems:",
    ]
    said = " ".join(" ".join(lines).split())
    assert "reasoning-gym/NAME for each of 2 (--json lists them)" in said and said.endswith("Riddles (riddles)")
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if line.startswith("  reasoning-gym/")]


def test_a_dry_run_names_what_the_engine_brings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    heads = ("model.num_attention_heads=2", "model.num_query_groups=2")  # of a size that vLLM has on a CPU
    words = ["demo", "inference.engine=vllm", *heads, "--dry-run", "--cluster", "local"]
    done = CliRunner().invoke(mrl_submit, words)
    assert "note: inference.engine=vllm also sets resume.partial=keep" in done.stderr
    assert "would start demo on 2 CPU processes of this machine with vllm beside them" in done.stderr


def test_every_shipped_recipe_has_a_line_and_a_purpose() -> None:
    lines = within("recipes").stdout.splitlines()
    assert [line.split()[0] for line in lines[::2]] == shipped_recipes()
    assert all(line.startswith("    ") and len(line) > 20 for line in lines[1::2])
    assert max(map(len, lines[::2])) <= 100
    (partitioned,) = [line for line in lines if line.startswith("qwen2.5-32b-dapo-partitioned")]
    assert partitioned.split()[1:] == ["Qwen2.5-32B", "8", "x", "8", "partitioned"]


def test_json_has_the_same_content() -> None:
    rows = {row["name"]: row for row in json.loads(within("recipes", "--json").stdout)["recipes"]}
    assert sorted(rows) == shipped_recipes()
    demo = {"model": "2 layers of 64", "nodes": 1, "gpus_per_node": 2, "device": "cpu", "mode": "colocated"}
    assert demo.items() < rows["demo"].items()
    assert rows["qwen3-4b-dapo"]["model"] == "Qwen/Qwen3-4B"


def test_the_purpose_is_the_first_sentence_of_the_first_comment() -> None:
    assert purpose("# Qwen2.5 learns\n# to add. More.\n\n# Other.\nname: a\n") == "Qwen2.5 learns to add"
    assert purpose("name: a\n") == ""
