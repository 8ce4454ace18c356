"""A function of the user's in a recipe: its file, its check at submission, and the run's copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.backends.local import supervisor_command
from launcher.errors import BadInput
from launcher.job import lesson as lesson_module
from launcher.job.code_sources import code_sources
from launcher.job.lesson import LessonCheck, LessonVerdict
from launcher.job.run_directory import prepare
from launcher.plan.summary import make_plan
from launcher.recipe.load import Recipe, load_recipe, read_resolved
from megatron_rl.contract.files import write_atomic
from megatron_rl.contract.paths import RunDir
from megatron_rl.recipe.own_code import kept

LOSS = "def loss(tokens, config):\n    return -tokens.ratio * tokens.advantages * tokens.weights\n"


def checked(recipe: Recipe, *included: Path) -> LessonVerdict:
    with LessonCheck(recipe, included=included) as lesson:
        return lesson.verdict()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the check take as long as a busy machine needs."""
    monkeypatch.setattr(lesson_module, "LIMIT_S", 250.0)


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    (tmp_path / "mine.py").write_text(LOSS)
    (tmp_path / "mine.yaml").write_text("extends: demo\nname: mine\ngrpo: {policy_loss: 'mine:loss'}\n")
    return load_recipe(str(tmp_path / "mine.yaml"))


def test_file_without_the_function_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("x = 1\n")
    (tmp_path / "mine.yaml").write_text("extends: demo\nname: mine\ngrpo:\n  policy_loss: mine:loss\n")
    with pytest.raises(BadInput, match=r"mine\.yaml:4: grpo\.policy_loss: .*mine\.py defines no function loss"):
        load_recipe(str(tmp_path / "mine.yaml"))


def test_unusable_function_is_refused_before_anything_starts(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LOSS.replace("* tokens.weights", ""))
    (found,) = checked(recipe).problems
    assert "mine.yaml:3: grpo.policy_loss: a token of weight 0 has a loss" in found


def test_modules_of_included_directories_are_checked_too(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "elsewhere_of_tests.py").write_text(LOSS)
    override = "grpo.policy_loss=elsewhere_of_tests:loss"
    recipe = load_recipe("demo", [override])
    assert recipe.config.grpo.policy_loss == "elsewhere_of_tests:loss"
    assert not checked(recipe, tmp_path / "code").problems


def test_run_keeps_a_copy_that_only_change_replaces(recipe: Recipe, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    prepare(recipe, run.root, change=False)
    reference = read_resolved(run.resolved).grpo.policy_loss
    assert Path(kept(reference, run).rpartition(":")[0]).read_text() == LOSS
    write_atomic(run.fork, "")  # it began from a checkpoint, so its copies stay
    (tmp_path / "mine.py").write_text(LOSS.replace("ratio", "logprobs"))
    prepare(recipe, run.root, change=False)
    assert "ratio" in Path(kept(reference, run).rpartition(":")[0]).read_text()
    prepare(recipe, run.root, change=True)
    assert "logprobs" in Path(kept(reference, run).rpartition(":")[0]).read_text()


def test_package_of_a_function_is_part_of_the_snapshot() -> None:
    recipe = load_recipe("demo", ["grpo.policy_loss=hypothesis.strategies:loss"])
    assert "hypothesis" in [source.name for source in code_sources(recipe, Path("/"))]


def test_ranks_on_this_machine_import_from_included_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe("demo")
    attempt = RunDir(tmp_path).attempt(1)

    def command(*include: str) -> list[str]:
        sizes = make_plan(recipe, None).sizes
        code = recipe.config.code.model_copy(update={"include": [*include]})
        config = recipe.config.model_copy(update={"code": code})
        return supervisor_command(RunDir(tmp_path), attempt, config, sizes, 60.0, None)

    monkeypatch.setenv("PYTHONPATH", "/theirs")
    plain, included = command(), command("/mine", "/more")
    end = plain.index("--") + 1
    assert included == [*plain[:end], "env", "PYTHONPATH=/mine:/more:/theirs", *plain[end:]]
