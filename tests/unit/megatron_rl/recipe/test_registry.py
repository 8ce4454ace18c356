"""The registry: an environment is any installed package's entry point of the group `mrl.environments`."""

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from pydantic import ValidationError

from megatron_rl.agent.api import build_environment
from megatron_rl.model.tokenizer import build_tokenizer
from megatron_rl.recipe import registry
from megatron_rl.recipe.environment_section import EnvironmentConfig
from megatron_rl.recipe.registry import (
    describe_environments,
    environment_arguments,
    environment_class,
    environment_names,
)
from megatron_rl.recipe.tokenizer_section import TokenizerConfig

PLUGIN = """
    from megatron_rl.agent.trajectories import Problem
    from megatron_rl.agent.reward_only import RewardOnlyAgent
    from megatron_rl.recipe.section import Section

    class Riddles(RewardOnlyAgent):
        class Config(Section):
            count: int = 2

        def training_problems(self):
            return [Problem(str(number), {}) for number in range(self.config.count)]

        def evaluation_problems(self):
            return {}

        def get_reward(self, response, golden, finish_reason):
            return 0.0
"""

TOKENIZER = build_tokenizer(TokenizerConfig(type="characters", alphabet="0123456789+-="))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory of installed packages, found like any other."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def install(site: Path, package: str, name: str, value: str, source: str = "") -> None:
    """Files that an installer creates for `package` 2.1: one module and its metadata."""
    (site / f"{package}.py").write_text(dedent(source))
    metadata = site / f"{package}-2.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 2.1\n")
    (metadata / "entry_points.txt").write_text(f"[mrl.environments]\n{name} = {value}\n")


def test_environment_of_another_package_is_found_configured_and_built(site: Path) -> None:
    install(site, "plugin_good", "riddles", "plugin_good:Riddles", PLUGIN)
    assert environment_names() == sorted(environment_names()) and "riddles" in environment_names()
    environment = build_environment(EnvironmentConfig(name="riddles", args={"count": 3}), TOKENIZER)
    assert len(environment.training_problems()) == 3


def test_prints_of_an_imported_package_stay_out_of_the_output(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A command with JSON output writes nothing else."""
    install(site, "plugin_loud", "riddles", "plugin_loud:Riddles", f'{dedent(PLUGIN)}\nprint("welcome")\n')
    assert environment_class("riddles").__name__ == "Riddles"
    assert capsys.readouterr() == ("", "welcome\n")


def test_bad_arguments_are_rejected_by_the_environments_config(site: Path) -> None:
    install(site, "plugin_args", "riddles_args", "plugin_args:Riddles", PLUGIN)
    with pytest.raises(ValidationError, match="coutn"):
        build_environment(EnvironmentConfig(name="riddles_args", args={"coutn": 3}), TOKENIZER)


def test_variant_in_the_name_excludes_the_argument(site: Path) -> None:
    """The two could contradict each other."""
    source = PLUGIN.replace("class Config", 'variant_argument = "kind"\n\n        class Config').replace(
        "count: int = 2", 'count: int = 2\n            kind: str = "old"'
    )
    install(site, "plugin_kinds", "riddles_of", "plugin_kinds:Riddles", source)
    new = environment_arguments(EnvironmentConfig(name="riddles_of/new", args={"count": 3}))
    assert (new.kind, new.count) == ("new", 3)
    assert environment_arguments(EnvironmentConfig(name="riddles_of", args={"kind": "new"})).kind == "new"
    with pytest.raises(ValueError, match="'riddles_of/new' already sets kind by its name: remove it"):
        environment_arguments(EnvironmentConfig(name="riddles_of/new", args={"kind": "old"}))


def test_unknown_name_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"unknown environment 'aritmetic' \(did you mean 'arithmetic'\?\); registered"
    ):
        environment_class("aritmetic")
    with pytest.raises(ValueError, match=r"unknown environment 'zzz'; registered are .*arithmetic"):
        environment_class("zzz")


@pytest.mark.parametrize(
    ("value", "source", "complaint"),
    [
        ("plugin_bad:Riddles", "import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("plugin_bad:Riddles", "", "has no attribute 'Riddles'"),
        ("plugin_bad:Riddles", "1 / 0", r"ZeroDivisionError: division by zero \(plugin_bad.py:1: 1 / 0\)"),
        ("plugin_bad:Riddles", "raise SystemExit('no GPU')", "SystemExit: no GPU"),
        ("plugin_bad:Riddles", "class Riddles: pass", "not a subclass of megatron_rl.agent.api.Environment"),
        ("plugin_bad:Riddles", PLUGIN.replace("Config(Section)", "Config"), "has no Config"),
    ],
)
def test_broken_plugin_is_one_error_that_names_its_package(site: Path, value: str, source: str, complaint: str) -> None:
    install(site, "plugin_bad", "riddles_bad", value, source)
    sys.modules.pop("plugin_bad", None)
    with pytest.raises(ValueError, match=rf"'riddles_bad' of plugin_bad 2.1 \(plugin_bad:Riddles\) .*{complaint}"):
        environment_class("riddles_bad")


def test_environment_with_broken_variants_hides_no_other(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = "    @classmethod\n    def variants(cls):\n        raise KeyError('cache')\n"
    install(site, "plugin_many", "riddles_many", "plugin_many:Riddles", f"{dedent(PLUGIN)}\n{broken}")
    registered = registry.registered
    monkeypatch.setattr(registry, "registered", lambda name=None: registered("riddles_many"))
    [one] = describe_environments()
    assert one.description == "cannot be used: its variants cannot be listed: KeyError: 'cache'"


def test_two_packages_with_one_name_are_both_named(site: Path) -> None:
    install(site, "plugin_one", "riddles_twice", "plugin_one:Riddles")
    install(site, "plugin_two", "riddles_twice", "plugin_two:Riddles")
    with pytest.raises(ValueError, match=r"more than once, by .*plugin_one 2.1 .*and .*plugin_two 2.1 "):
        environment_class("riddles_twice")


def test_looking_up_an_environment_loads_no_heavy_library() -> None:
    """The launcher validates recipes on a login node that has neither torch nor reasoning-gym."""
    program = """
        import sys
        from megatron_rl.recipe.registry import environment_class
        environment_class("arithmetic").Config(max_digits=2)
        print(*sorted({"torch", "megatron", "numpy", "reasoning_gym", "transformers"} & set(sys.modules)))
    """
    done = subprocess.run([sys.executable, "-c", dedent(program)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")
