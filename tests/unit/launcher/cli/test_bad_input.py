"""Unusable input gives one error with its place, and exit code 2 (I1)."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from run_helpers import make_run

from launcher.cli.main import main
from launcher.cli.mrl_submit import main as mrl_submit
from megatron_rl.contract import paths

LIMIT_S = 10.0  # of processor time


def aliases(first: str, line: str) -> str:
    return first + "".join(line.format(f"a{i}", ",".join([f"*a{i - 1}"] * 10)) for i in range(1, 10))


RECIPES = {
    "bomb": (aliases("a0: &a0 [x]\n", "{0}: &{0} [{1}]\n"), "expands to more than 100000 values"),
    "merged": (aliases("a0: &a0 {k: 1}\n", "{0}: &{0} {{<<: [{1}]}}\n"), "expands to more than 100000 values"),
    "brackets": ("a: " + "[" * 20_000, "brackets.yaml:1: is nested more than 50 deep"),
    "braces": ("a: " + "{a: " * 20_000, "braces.yaml:1: is nested more than 50 deep"),
    "indented": ("".join(" " * depth + "a:\n" for depth in range(3000)), "is nested more than 50 deep"),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("MRL_CLUSTERS", str(tmp_path / "clusters.yaml"))
    Path("clusters.yaml").write_text(f"lab: {{gpus_per_node: 8, container: null, run_root: {tmp_path}/root}}\n")


def refusal(*words: str, dry: bool = True) -> str:
    began = time.process_time()
    done = CliRunner().invoke(mrl_submit, [*words, *(["--dry-run"] if dry else [])])
    assert time.process_time() - began < LIMIT_S
    assert (done.exit_code, type(done.exception)) == (2, SystemExit), done.exception
    return done.stderr


@pytest.mark.parametrize("name", RECIPES)
def test_an_unknown_recipe(name):
    text, said = RECIPES[name]
    Path(f"{name}.yaml").write_text(text)
    assert said in refusal(f"{name}.yaml")


def test_a_recipe_that_is_not_a_file():
    os.mkfifo("pipe.yaml")
    Path("loop.yaml").symlink_to("loop.yaml")
    for file, said in {
        "pipe.yaml": "pipe.yaml: cannot be read: is not a regular file",
        "/dev/zero": "/dev/zero: cannot be read: is not a regular file",
        "loop.yaml": "loop.yaml: cannot be read: Too many levels of symbolic links",
        ".": ".: cannot be read: is not a regular file",
        "": "RECIPE is empty",
        " ": "RECIPE is empty",
        "x" * 5000: "no recipe is called",
    }.items():
        assert said in refusal(file)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("code.include=[~nouser/x]", "code.include.0: '~nouser/x' is not a path: "),
        ('code.include=["a\\0b"]', "is not a path: it contains a zero byte"),
        ("code.include=[loop]", "/loop: no such directory on "),
        ("environment.args.x=" + "[" * 20_000, "is nested more than 50 deep"),
        ("name=\udcff", "is not UTF-8 text"),
        ("optimizer.learning_rate=1e-3,0.001", "learning_rate=1e-3 and learning_rate=0.001 are the same run"),
    ],
)
def test_an_invalid_override(override, said):
    Path("loop").symlink_to("loop")
    assert said in refusal("demo", override, "--cluster", "lab")


@pytest.mark.parametrize("cluster", ["local", "lab"])
@pytest.mark.parametrize("dry", [True, False])
def test_a_layout_that_does_not_divide_the_ranks_is_refused_with_the_nearest(cluster, dry):
    said = refusal("demo", "--cluster", cluster, "placement.training.cp=3", "--run-dir", "run", dry=dry)
    assert "cp 3 = 3 does not divide" in said
    assert "nearest that work: placement.training.cp=2" in said
    assert not Path("run").exists()


def test_a_sweep_of_thousands_needs_confirmation_and_one_is_not_put_into_the_directory_of_a_run(tmp_path):
    make_run(tmp_path / "run")
    words = ("demo", "training.seed=1,2", "--run-dir", "run", "--cluster", "lab")
    assert "run holds a run, but 2 runs are requested" in refusal(*words)
    seeds = ",".join(map(str, range(300)))
    rates = ",".join(f"{number}e-6" for number in range(1, 301))
    words = ("demo", f"training.seed={seeds}", f"optimizer.learning_rate={rates}", "--cluster", "lab")
    assert "this is a sweep of 90000 runs; confirm it with --yes" in refusal(*words)
    assert "90000" in refusal(*words, dry=False)


@pytest.mark.parametrize("cluster", ["local", "lab"])
@pytest.mark.parametrize("dry", [True, False])
def test_an_invalid_run_directory(cluster, dry):
    Path("d.yaml").write_text("")
    Path("loop").symlink_to("loop")
    Path("dangling").symlink_to("nowhere/x")
    for place, said in {
        "d.yaml": "d.yaml is a file, and a run needs a directory",
        "d.yaml/x/y": "d.yaml is a file, and a run needs a directory",
        "loop": "loop is a link that leads nowhere",
        "loop/x": "loop/x: Too many levels of symbolic links",
        "dangling": "dangling is a link that leads nowhere",
        "dangling/x": "dangling is a link that leads nowhere",
        "x" * 300: "File name too long",
        "\udcff": "not UTF-8",
        "": "'--run-dir': the path is empty",
    }.items():
        assert said in refusal("demo", "--run-dir", place, "--cluster", cluster, dry=dry), place
    assert sorted(path.name for path in Path().iterdir()) == ["clusters.yaml", "d.yaml", "dangling", "loop"]


def test_a_run_of_a_colleague_without_read_permission(tmp_path, monkeypatch):
    run = make_run(tmp_path / "theirs")

    def denied(folder: Path) -> list[str]:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(paths, "names_in", denied)
    for words in (["logs"], ["logs", "--list"]):
        done = CliRunner().invoke(main, [words[0], str(run.root), *words[1:]])
        assert (done.exit_code, done.stderr) == (1, f"error: theirs: {run.root}/attempts: Permission denied\n")
    done = CliRunner().invoke(main, ["status", str(run.root)])
    assert (done.exit_code, f"reason     {run.root}/attempts: Permission denied" in done.stdout) == (3, True)
    assert f"{run.root}/checkpoints: Permission denied" in CliRunner().invoke(main, ["fork", str(run.root)]).stderr


def test_a_home_without_read_permission(tmp_path, monkeypatch):
    monkeypatch.delenv("MRL_CLUSTERS")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/proc/1/nowhere")
    real = Path.exists

    def exists(path: Path) -> bool:
        if str(path).startswith("/proc/1/nowhere"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(Path, "exists", exists)
    assert "clusters.yaml: cannot be read: Permission denied; MRL_CLUSTERS names another" in refusal("demo")
