"""Check of a recipe's rows and functions at submission: places of faults, what is left to the ranks, and its limit."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from launcher.backends.child import ModuleProcess
from launcher.cli.mrl_submit import main
from launcher.cluster.profile import Profile
from launcher.errors import BadInput
from launcher.job import lesson
from launcher.job.lesson import LessonCheck, LessonVerdict
from launcher.job.run_directory import prepare
from launcher.recipe.load import load_recipe
from megatron_rl.contract.files import write_atomic
from megatron_rl.contract.paths import RunDir

RECIPE = """\
extends: demo
name: mine
environment:
  name: python
  args:
    file: reward.py
    train: ./rows.jsonl
model: {init: from-scratch}
evaluation: {every: 0}
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A recipe with rows and a reward of the user's."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "reward.py").write_text("def reward(response, answer):\n    return float(response == answer)\n")
    (tmp_path / "mine.yaml").write_text(RECIPE)
    return tmp_path


def checked(folder: Path, profile: Profile | None = None, *overrides: str, run: RunDir | None = None) -> LessonVerdict:
    with LessonCheck(load_recipe(str(folder / "mine.yaml"), overrides), profile, run=run) as check:
        return check.verdict()


def test_fault_of_a_row_has_the_place_of_its_file_in_the_recipe(mine: Path) -> None:
    (mine / "rows.jsonl").write_text('{"question": "1+1="}\n')
    (said,) = checked(mine).problems
    assert said.startswith(f"{mine}/mine.yaml:7: environment.args.train") and "no column 'prompt'" in said


@pytest.mark.parametrize("row", ['{"prompt": "1+1=", name: 2}', '{"prompt": "1*1=", "answer": "1"}'])
def test_words_of_the_data_and_of_advice_do_not_change_the_place_of_a_fault(mine: Path, row: str) -> None:
    (mine / "rows.jsonl").write_text(row + "\n")  # "expecting property name"; "add it to tokenizer.alphabet"
    (said,) = checked(mine).problems
    assert said.startswith(f"{mine}/mine.yaml:7: environment.args.train.path: data set")


def test_missing_file_of_one_of_several_environments_has_its_place(mine: Path) -> None:
    several = "environments:\n- name: arithmetic\n- name: python\n  args:\n    file: none.py\n    train: ./rows.jsonl\n"
    (mine / "mine.yaml").write_text(f"extends: demo\n{several}environment: null\n")
    with pytest.raises(BadInput, match=r"mine.yaml:6: .*none\.py: no such file"):
        checked(mine)


def test_rows_that_a_run_would_leave_out_are_noted(mine: Path) -> None:
    (mine / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+1=", "answer": "3"}\n')
    found = checked(mine)
    assert not found.problems and "other values (answer): 1; questions that remain: 1" in found.notes[0]


def test_reward_is_imported_from_its_copy_and_named_by_its_file(mine: Path) -> None:
    (mine / "reward.py").write_text("def reward(response, level):\n    return 1\n")
    (said,) = checked(mine).problems
    assert "environment.args.file: reward.py: reward needs the column level" in said and "mrl-copies" not in said


def test_run_that_has_trained_is_checked_with_its_own_copy(mine: Path) -> None:
    run = RunDir(mine / "run")
    prepare(load_recipe(str(mine / "mine.yaml")), run.root, change=False)
    write_atomic(run.fork, "")  # it began from a checkpoint, so its copies stay
    (mine / "reward.py").write_text("import no_such_package\ndef reward(response): return 1\n")
    assert not checked(mine, run=run).problems
    assert checked(mine).problems


def test_package_that_only_the_image_may_have_is_left_to_the_ranks(mine: Path) -> None:
    (mine / "reward.py").write_text("import no_such_package\ndef reward(response): return 1\n")
    values = {"gpus_per_node": 1, "run_root": str(mine), "container": {"image": "a:b"}}
    found = checked(mine, Profile.model_validate(values))
    assert not found.problems and "No module named 'no_such_package'" in found.notes[0]
    assert "; rank 0 checks it" in found.notes[0]


def test_check_that_takes_too_long_is_left_to_the_ranks(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lesson, "LIMIT_S", 0.0)
    found = checked(mine, None, "environment.args.split_seed=1")
    assert not found.problems and "took more than 0 s here" in found.notes[0]


def test_check_that_crashes_does_not_stop_the_run(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lesson, "rows_child", lambda *_: ModuleProcess("megatron_rl.no_such_module"))
    found = checked(mine, None, "environment.args.split_seed=2")
    assert not found.problems and "No module named megatron_rl.no_such_module; rank 0 checks it" in found.notes[0]


def test_recipe_with_the_lesson_of_a_shipped_one_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Started(Exception):
        pass

    def start(*words: object) -> None:
        raise Started

    monkeypatch.setattr(lesson, "rows_child", start)
    for overrides in ([], ["training.seed=2", "optimizer.learning_rate=1e-4"]):
        with LessonCheck(load_recipe("demo", overrides)) as check:
            assert check.verdict() == LessonVerdict()
    with pytest.raises(Started), LessonCheck(load_recipe("demo", ["environment.args.max_terms=3"])):
        pass


@pytest.mark.usefixtures("mine")
def test_nothing_is_written_for_a_recipe_with_a_fault(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(mine)
    (mine / "rows.jsonl").write_text("")
    dry, real = (CliRunner().invoke(main, ["mine.yaml", "--run-dir", "r", *more]) for more in (["--dry-run"], []))
    assert (dry.exit_code, real.exit_code) == (2, 2)
    assert "would be refused: mine.yaml:7: environment.args.train" in dry.stderr
    assert "error: mine.yaml:7: environment.args.train" in real.stderr and not (mine / "r").exists()
