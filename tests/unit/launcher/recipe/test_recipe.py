"""Loading of recipes; each error says where and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import BadInput
from launcher.recipe.load import asked_text, dump_resolved, load_recipe, read_resolved
from launcher.recipe.located_yaml import read
from launcher.recipe.shipped import SHIPPED, shipped_recipes
from megatron_rl.recipe.config import RunConfig

DEMO = (SHIPPED / "demo.yaml").read_text(encoding="utf-8")

VALUES = load_recipe("demo").config.model_dump()


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write my.yaml into the current directory: the demo with some text replaced."""
    monkeypatch.chdir(tmp_path)

    def write(old: str = "", new: str = "") -> int:
        assert old in DEMO
        text = DEMO.replace(old, new, 1)
        Path("my.yaml").write_text(text, encoding="utf-8")
        return DEMO[: DEMO.index(old)].count("\n") + 1

    return write


def problems(asked: str, *overrides: str) -> list[str]:
    with pytest.raises(BadInput) as caught:
        load_recipe(asked, overrides)
    assert caught.value.exit_code == 2
    return list(caught.value.problems)


def test_a_shipped_recipe_is_known_by_name():
    assert "demo" in shipped_recipes()
    recipe = load_recipe("demo")
    assert recipe.config.name == "demo"
    assert recipe.config.job.world_size == 2
    assert recipe.text == DEMO


def test_a_folder_does_not_hide_a_shipped_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("demo").mkdir()
    assert load_recipe("demo").text == DEMO


def test_a_recipe_written_on_windows_leaves_no_carriage_return(tmp_path):
    for end in ("\r\n", "\r"):
        (tmp_path / "my.yaml").write_bytes(DEMO.replace("\n", end).encode())
        recipe = load_recipe(str(tmp_path / "my.yaml"), ["name=mine\r\n"])
        assert recipe.text == DEMO
        head, _, rest = asked_text(recipe).partition("\n")
        assert (head, rest) == (r"# override: 'name=mine\r\n'", DEMO)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("group_size:", "group_sizes:", "grpo.group_sizes: unknown key (did you mean group_size?)"),
        ("grpo:", "group_size: 4\ngrpo:", "group_size: unknown key (did you mean grpo.group_size?)"),
        ("num_layers: 2", "num_layers: two", "model.num_layers: expected an integer > 0, got 'two'"),
        ("hidden_size: 64", "hidden_size: 66", "model: hidden_size 66 is not divisible by num_attention_heads 4"),
        ("args: {}", "args: {no_such: 1}", "environment.args.no_such: unknown key"),
        (
            "name: arithmetic",
            "name: arithmetik",
            "environment.name: unknown environment 'arithmetik' (did you mean 'ar",
        ),
        ("name: demo", "evaluate: {k: 1}\nname: demo", "evaluate: was removed: `mrl evaluate CHECKPOINT`"),
    ],
)
def test_an_error_names_the_line_and_what_is_expected(write, old, new, said):
    line = write(old, new)
    (problem,) = problems("my.yaml")
    assert problem.startswith(f"my.yaml:{line}: {said}")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainin.steps=3", "trainin.steps: unknown key (did you mean training.steps?)"),
        ("grpo.xyzzy=1", "grpo.xyzzy: unknown key"),
        ("grpo.global_batch=7", "grpo: global_batch 7 is not a multiple of group_size 16"),
        ("environment.args.nope=1", "environment.args.nope: unknown key"),
        ("evaluate.k=4", "evaluate.k: was removed: `mrl evaluate CHECKPOINT`"),
        ("image.reference=5", "image.reference: expected text or null, got 5 (put it in quotes)"),
        ("model.architecture=qwen9", "model.architecture qwen9 is not one of deepseek_v3, gemma3_text"),
        ("model.architecture=glm4_moe", "model.architecture is glm4_moe, which has no model with qkv_bias true"),
        (
            "model.rope_scaling={type: yarn, factor: 4, low_freq_factor: 2}",
            "model.rope_scaling: low_freq_factor has no effect with type yarn: it belongs to llama3",
        ),
    ],
)
def test_an_error_names_the_override_that_caused_it(override, said):
    assert problems("demo", override)[0].startswith(f"override {override!r}: {said}")


def test_a_missing_key_points_at_its_section(write):
    write("  hidden_size: 64\n")
    line = DEMO[: DEMO.index("\nmodel:")].count("\n") + 2
    assert problems("my.yaml") == [f"my.yaml:{line}: model.hidden_size: missing; expected an integer > 0"]


def test_sizes_on_one_line_point_at_that_line(write):
    text = "extends: demo\nsampling: {max_new_tokens: 32}\ntraining: {sequence_length: 16}\n"
    write()
    Path("my.yaml").write_text(text, encoding="utf-8")
    (problem,) = problems("my.yaml")
    assert problem.startswith("my.yaml:2: sampling.max_new_tokens 32 leaves no room for a prompt in training.seq")


def test_all_problems_are_listed_at_once(write):
    write("num_layers: 2", "num_layers: two")
    found = problems("my.yaml", "grpo.group_size=1", "training.steps=0")
    assert len(found) == 3
    assert "override 'grpo.group_size=1': grpo.group_size: expected an integer >= 2, got 1" in found


@pytest.mark.parametrize("override", ["grpo.group_size", "=3", "grpo..group_size=3"])
def test_an_override_must_be_a_key_and_a_value(override):
    assert "expected section.key=value" in problems("demo", override)[0]


SERVERS = "{kind: vllm, urls: 'http://a/v1', folder: served}"


@pytest.mark.parametrize(
    "overrides",
    [
        ["inference.engine=server"],
        [f"inference.server={SERVERS}"],
        ["inference.server.kind=vllm"],
        ["inference.engine=server", "inference.server.kind=vllm"],
    ],
)
def test_one_error_names_what_replaces_a_removed_key_or_value(overrides):
    (problem,) = problems("demo", *overrides)
    assert "removed: answers come from replicas that the run starts: set inference.engine to vllm" in problem


def test_a_removed_key_of_a_file_is_refused_with_its_line(write):
    write()
    text = f"extends: demo\ninference:\n  engine: server\n  server: {SERVERS}\n"
    Path("my.yaml").write_text(text, encoding="utf-8")
    assert [problem.partition(": inference.engine is server")[0] for problem in problems("my.yaml")] == ["my.yaml:3"]
    Path("my.yaml").write_text(text.replace("  engine: server\n", ""), encoding="utf-8")
    assert [problem.partition(": inference.server: was")[0] for problem in problems("my.yaml")] == ["my.yaml:3"]
    Path("my.yaml").write_text("extends: demo\nlogging:\n  histograms_every: 5\n", encoding="utf-8")
    assert problems("my.yaml") == [
        "my.yaml:3: logging.histograms_every: was removed: `mrl report` and `mrl rollouts` show rewards and lengths of "
        "answers; leave it out"
    ]


def test_a_run_of_an_earlier_version_keeps_its_recipe(tmp_path):
    values = load_recipe("demo").config.model_dump()
    values["inference"]["server"] = None
    values["logging"] |= {"histograms_every": 7, "wandb": {"project": "p", "rollouts": True}}
    (tmp_path / "resolved.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    now = load_recipe("demo", ["logging.wandb={project: p}"]).config
    assert read_resolved(tmp_path / "resolved.yaml") == now
    assert load_recipe(str(tmp_path / "resolved.yaml")).config == now


@pytest.mark.parametrize(("before", "now"), [(True, "around"), (False, "before")])
def test_a_run_of_an_earlier_version_keeps_a_renamed_key(tmp_path, before, now):
    values = load_recipe("demo").config.model_dump()
    del values["model"]["norms"]
    values["model"]["norms_around"] = before
    (tmp_path / "resolved.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    for config in (read_resolved(tmp_path / "resolved.yaml"), load_recipe(str(tmp_path / "resolved.yaml")).config):
        assert config == load_recipe("demo", [f"model.norms={now}"]).config


def test_a_run_of_a_newer_version_is_refused_in_one_line(tmp_path):
    values = load_recipe("demo").config.model_dump()
    values["model"]["foresight"] = 3
    values["telepathy"] = {"range": 7}
    (tmp_path / "resolved.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    wanted = (
        f"{tmp_path}/resolved.yaml: a newer mrl recorded this run, with keys that this one does not know "
        "(model.foresight and 1 more): use that mrl, or a later one"
    )
    assert problems(str(tmp_path / "resolved.yaml")) == [wanted]
    with pytest.raises(BadInput) as refused:
        read_resolved(tmp_path / "resolved.yaml")
    assert [*refused.value.problems] == [wanted]
    (tmp_path / "resolved.yaml").write_text(yaml.safe_dump(load_recipe("demo").config.model_dump()), encoding="utf-8")
    said = problems(str(tmp_path / "resolved.yaml"), "logging.wandb={project: a, projekt: mine}")
    assert "projekt: unknown key" in said[0]


def test_a_recipe_with_a_renamed_key_is_told_the_present_one(write):
    write()
    Path("my.yaml").write_text("extends: demo\nmodel:\n  norms_around: true\n", encoding="utf-8")
    wanted = "model.norms_around: was removed: write model.norms: around where it was true"
    (problem,) = problems("my.yaml")
    assert problem.startswith(f"my.yaml:3: {wanted}")
    assert wanted in problems("demo", "model.norms_around=true")[0]


def test_override_values_are_yaml_and_later_ones_win():
    config = load_recipe("demo", ["optimizer.learning_rate=3e-4", "grpo.advantage_std=none", "training.steps=5"]).config
    assert (config.optimizer.learning_rate, config.grpo.advantage_std, config.training.steps) == (3e-4, "none", 5)
    assert load_recipe("demo", ["training.steps=5", "training.steps=6"]).config.training.steps == 6


@pytest.mark.parametrize("number", [".nan", ".inf"])
def test_numbers_are_finite(number):
    assert "expected a number" in problems("demo", f"optimizer.learning_rate={number}")[0]


def test_a_key_given_twice_is_refused(write):
    line = write("training:", "name: other\n\ntraining:")
    first = DEMO[: DEMO.index("name: demo")].count("\n") + 1
    assert problems("my.yaml") == [f"my.yaml:{line}: name: given twice, first in line {first}"]


def test_a_key_that_yaml_makes_a_boolean_is_text():
    assert read("a: {on: [x], 'off': 1}\n").value == {"a": {"on": ["x"], "off": 1}}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "expected a mapping of sections"),
        ("5\n", "expected a mapping of sections"),
        ("- a\n- b\n", "expected a mapping of sections"),
        ("name: [1, 2\njob: {}\n", "my.yaml:2: not valid YAML"),
        ("name: a\n\tjob: {}\n", "my.yaml:2: is indented by a tab"),
        ("job:\n\tnodes: 1\n", "my.yaml:2: is indented by a tab"),
        ("1: a\n", "my.yaml:1: keys are text, got '1'"),
        ("name: &a\n  b: *a\n", "name.b: refers to itself"),
        ("name: &a [*a]\n", "name.0: refers to itself"),
        ("name: !!python/object/apply:os.getcwd []\n", "my.yaml:1: name: has the YAML tag "),
        ("name: 2024-13-01\n", "my.yaml:1: name: 2024-13-01 is a date to some readers of YAML"),
        ("a: b\n---\nc: d\n", "my.yaml:2: not valid YAML"),
        ("name: \x00\n", "not valid YAML"),
    ],
)
def test_broken_yaml_is_one_error_with_its_line(text, what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(text, encoding="utf-8")
    found = problems("my.yaml")
    assert len(found) == 1
    assert what in found[0]


def test_a_file_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "my.yaml").write_bytes(b"name: caf\xe9\n")
    assert "is not UTF-8 text (byte 9)" in problems(str(tmp_path / "my.yaml"))[0]


def test_merged_keys_keep_their_line_and_may_be_overridden(write):
    write("sampling:", "sampling: &base\n  top_q: 1.0")
    assert any("sampling.top_q: unknown key" in line for line in problems("my.yaml"))


def test_resolved_yaml_holds_every_default_and_reads_back(tmp_path):
    config = load_recipe("demo").config
    path = tmp_path / "resolved.yaml"
    path.write_text(dump_resolved(config))
    assert read_resolved(path) == config
    assert yaml.safe_load(path.read_text())["optimizer"]["epsilon"] == 1e-8  # readable without our loader
    path.write_text(path.read_text().replace("group_size", "grup_size"))
    with pytest.raises(BadInput, match=r"resolved\.yaml: a newer mrl recorded this run, .*\(grpo\.grup_size\)"):
        read_resolved(path)


@examples(20)
@given(
    rate=st.floats(min_value=0, max_value=1e300),
    characters=st.sets(st.characters(codec="utf-8"), min_size=1),
    name=st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,10}\Z"),
)
def test_resolved_yaml_round_trips_any_value(rate, characters, name):
    tokenizer = {"type": "characters", "alphabet": "".join(characters)}
    values = VALUES | {"name": name, "tokenizer": tokenizer, "optimizer": {"learning_rate": rate}}
    config = RunConfig.model_validate(values)
    assert RunConfig.model_validate(yaml.safe_load(dump_resolved(config))) == config


@pytest.mark.parametrize("written", ["10", "'10'"])
def test_a_time_limit_may_be_minutes(written):
    assert load_recipe("demo", [f"job.time_limit={written}"]).config.job.time_limit == "10"


@pytest.mark.parametrize("written", ["soon", "1.5", "-5", "true", "\uff14:00:00"])
def test_the_error_of_a_wrong_time_limit_gives_an_example(written):
    (problem,) = problems("demo", f"job.time_limit={written}")
    assert "expected minutes or a time such as 1-12:00:00 or null, got" in problem
    assert "quotes" not in problem  # they would not help


def test_on_gpus_the_silence_limit_must_be_below_the_collective_timeout():
    (problem,) = problems("qwen2.5-32b-dapo", "job.silence_limit_s=3600")
    assert "collective_timeout_s 3600 must be more than silence_limit_s 3600" in problem
    load_recipe("demo", ["job.silence_limit_s=36000"])


SEVERAL = """environments:
  - {name: arithmetic, weight: 2, args: {seed: 1}}
  - name: reasoning-gym/chain_sum
    evaluation_only: true
"""


def write_several(write, text: str = SEVERAL) -> int:
    """Write a recipe with several environments; returns the line of the first one."""
    return write(DEMO[DEMO.index("environment:") : DEMO.index("sampling:")], text + "\n") + 1


@pytest.mark.parametrize("place", ["2", "²", "9" * 5000])
def test_an_override_of_a_missing_list_item_is_refused(write, place):
    write_several(write)
    with pytest.raises(BadInput, match=r"a list of 2 has no item \S+, counted from 0"):
        load_recipe("my.yaml", [f"environments.{place}.weight=1"])


def test_several_environments_are_a_list(write):
    write_several(write)
    config = load_recipe("my.yaml", ["environments.1.evaluation_only=false", "environments.0.args.draws=50"]).config
    assert config.environments is not None
    assert [(one.id, one.weight, one.args, one.trained_on) for one in config.environments] == [
        ("arithmetic", 2, {"seed": 1, "draws": 50}, True),
        ("reasoning-gym/chain_sum", 1, {}, True),
    ]
    assert RunConfig.model_validate(yaml.safe_load(dump_resolved(config))) == config


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("weight: 2", "weight: -2", 0, "environments.0: weight -2 of environment 'arithmetic' is negative"),
        ("weight: 2", "weight: much", 0, "environments.0.weight: expected a number, got 'much'"),
        ("weight: 2", "wieght: 2", 0, "environments.0.wieght: unknown key (did you mean weight?)"),
        ("name: arithmetic", "nome: arithmetic", 0, "environments.0: name is missing"),
        (
            "seed: 1",
            "sead: 1",
            0,
            "environments.0.args.sead: unknown key (did you mean seed?) (environment 'arithmetic')",
        ),
        (
            "chain_sum",
            "chain_sum\n    args: {draws: 0}",
            2,
            "environments.1.args.draws: expected an integer > 0, got 0",
        ),
        ("reasoning-gym/", "raisoning-gym/", 1, "environments.1.name: unknown environment 'raisoning-gym/chain_sum'"),
        (
            "reasoning-gym/chain_sum",
            "arithmetic",
            -1,
            "environments: environment 'arithmetic' is listed more than once",
        ),
        ("weight: 2", "weight: 0", -1, "environments: nothing to train on"),
        ("weight: 2", "grpo: {btch: 1}", 0, "environments.0.grpo.btch: unknown key"),
        (
            "weight: 2",
            "grpo: {turn_weight: 2.0}",
            0,
            "environments.0.grpo: turn_weight is set, and turn_",
        ),
        (
            "weight: 2",
            "grpo: {turn_discount: 0.9}",
            0,
            "environments.0.grpo.turn_discount is set, and environment 'arithmetic' answers in one turn",
        ),
    ],
)
def test_an_error_in_the_list_names_line_and_environment(write, old, new, line, said):
    assert old in SEVERAL
    first = write_several(write, SEVERAL.replace(old, new))
    [found] = problems("my.yaml")
    assert found.startswith(f"my.yaml:{first + line}: {said}")


def test_environments_may_be_in_a_file_of_their_own(write):
    write_several(write, "environments: both.yaml\n")
    assert problems("my.yaml")[0].endswith("both.yaml: cannot be read: No such file or directory")
    Path("both.yaml").write_text(
        "- {agent_type: CountdownAgent, agent_args: {}, weight: 1.0}\n- {name: arithmetic, weight: 0.5}\n"
    )
    config = load_recipe("my.yaml").config
    assert [(one.name, one.weight) for one in config.environments or ()] == [("countdown", 1.0), ("arithmetic", 0.5)]


def test_environment_and_environments_together_are_refused():
    assert problems("demo", "environments=[{name: countdown}]")[0].endswith(
        "environments and environment are both given: set one of them to null"
    )
    assert (
        load_recipe("demo", ["environment=null", "environments=[{name: countdown}]"]).config.task.name == "multi-task"
    )


def test_an_unknown_name_gets_a_suggestion():
    assert problems("dmo") == ["no recipe is called 'dmo' and no file either; did you mean demo?"]


def test_errors_of_all_environments_are_reported_at_once(write):
    write_several(write, SEVERAL.replace("seed: 1", "sead: 1").replace("chain_sum", "chain_sum\n    args: {draws: 0}"))
    assert [problem.partition(": ")[2].partition(": ")[0] for problem in problems("my.yaml")] == [
        "environments.0.args.sead",
        "environments.1.args.draws",
    ]
