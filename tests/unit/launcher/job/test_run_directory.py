"""The run directory before an attempt: made once, never taken from anybody, and only resumed with the same values."""

from __future__ import annotations

import hashlib
from datetime import date
from pathlib import Path

import pytest

from launcher.errors import BadInput
from launcher.host.process.lock import RunLock
from launcher.job.directories import run_directory
from launcher.job.run_directory import OpenedRun, opened, prepare
from launcher.recipe.load import load_recipe, read_resolved
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import encode_line, read, read_lines
from megatron_rl.contract.run_records import KeptFiles, RecipeChange
from megatron_rl.recipe.registry import with_kept_files


def ask(root: Path, *overrides: str, change: bool = False) -> OpenedRun:
    return prepare(load_recipe("demo", ["training.steps=800", "grpo.group_size=16", *overrides]), root, change)


def trained(root: Path) -> RunDir:
    """A run that has made a step."""
    run = ask(root).run
    run.metrics.write_text(encode_line(MetricsLine(1, {})) + "\n")
    return run


def refusal(root: Path, *overrides: str, change: bool = False) -> str:
    with pytest.raises(BadInput) as caught:
        ask(root, *overrides, change=change)
    return "\n".join(caught.value.problems)


def test_a_new_run_gets_its_recipe_and_its_first_attempt(tmp_path):
    prepared = ask(tmp_path / "new" / "run", "training.steps=5")
    assert prepared.attempt is not None
    assert prepared.attempt.number == 1
    assert prepared.attempt.folder.is_dir()
    assert prepared.attempt.logs.is_dir()
    assert read_resolved(prepared.run.resolved).training.steps == 5
    text = prepared.run.recipe.read_text()
    assert "# override: training.steps=5\n" in text
    assert text.endswith(load_recipe("demo").text)


def test_the_same_values_open_the_next_attempt(tmp_path):
    ask(tmp_path)
    prepared = ask(tmp_path)
    assert prepared.attempt is not None
    assert prepared.attempt.number == 2
    assert not prepared.run.changes.exists()


def test_other_values_are_listed_and_refused(tmp_path):
    trained(tmp_path)
    text = refusal(tmp_path, "training.steps=9", "grpo.group_size=8")
    assert "training.steps: 800 -> 9" in text
    assert "grpo.group_size: 16 -> 8" in text
    assert "start a new run, or fork this one" in text, "--change would refuse the group size"
    assert "give --change" in refusal(tmp_path, "training.steps=900")
    assert read_resolved(RunDir(tmp_path).resolved).training.steps == 800


def test_change_alters_the_documented_set_and_records_it(tmp_path):
    trained(tmp_path)
    prepared = ask(tmp_path, "training.steps=900", change=True)
    assert [str(change) for change in prepared.changes] == ["training.steps: 800 -> 900"]
    assert read_resolved(prepared.run.resolved).training.steps == 900
    (line,) = read_lines(RecipeChange, prepared.run.changes).records
    assert (line.attempt, line.changes) == (2, {"training.steps": [800, 900]})


def test_change_does_not_alter_what_makes_the_run_itself(tmp_path):
    trained(tmp_path)
    text = refusal(tmp_path, "training.steps=900", "grpo.group_size=8", change=True)
    assert "grpo.group_size: 16 -> 8" in text
    assert "training.steps: 800" not in text
    assert read_resolved(RunDir(tmp_path).resolved).training.steps == 800


def test_a_run_cannot_gain_or_lose_adapters_or_take_others(tmp_path):
    """Its checkpoints hold either all weights or these adapters."""
    trained(tmp_path / "all")
    for change in (False, True):
        assert "model.lora.rank: None -> 4" in refusal(tmp_path / "all", "model.lora.rank=4", change=change)
    ask(tmp_path / "adapters", "model.lora.rank=4")
    RunDir(tmp_path / "adapters").metrics.write_text(encode_line(MetricsLine(1, {})) + "\n")
    assert "model.lora.rank: 4 -> None" in refusal(tmp_path / "adapters", change=True)
    assert "model.lora.rank: 4 -> 8" in refusal(tmp_path / "adapters", "model.lora.rank=8", change=True)
    assert "model.lora.rs: False -> True" in refusal(
        tmp_path / "adapters", "model.lora.rank=4", "model.lora.rs=true", change=True
    )


def chat_run(root: Path, *overrides: str) -> RunDir:
    """A run whose prompts are written by a chat template."""
    return prepare(load_recipe("smollm2-135m-chain-sum", overrides), root, False).run


def test_a_run_keeps_the_day_that_its_prompts_were_first_written_on(tmp_path):
    before = date.today()
    new = read_resolved(chat_run(tmp_path / "new").resolved).tokenizer.date
    assert new in (before.isoformat(), date.today().isoformat())
    old = tmp_path / "old"
    chat_run(old, "tokenizer.date='2026-01-02'")
    assert read_resolved(chat_run(old).resolved).tokenizer.date == "2026-01-02"
    RunDir(old).metrics.write_text(encode_line(MetricsLine(1, {})) + "\n")
    with pytest.raises(BadInput, match=r"tokenizer\.date: '2026-01-02' -> '2026-01-03'"):
        chat_run(old, "tokenizer.date='2026-01-03'")


def test_a_run_that_never_trained_begins_with_the_corrected_recipe(tmp_path):
    run = ask(tmp_path).run
    identity = run.identity.read_text()
    for path in (run.evaluations, run.bank / "rank.bin", run.checkpoint(0) / "manifest.json", run.attempt(1).log(0)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("of before")
    run.attempts_ledger.write_text("its ends\n")
    (run.root / "code-001").mkdir()
    run.code.symlink_to("code-001")
    prepared = ask(tmp_path, "grpo.group_size=8", "model.hidden_size=32")
    assert prepared.corrected and prepared.attempt is not None and prepared.attempt.number == 2
    assert [one.key for one in prepared.changes] == ["model.hidden_size", "grpo.group_size"]
    assert read_resolved(run.resolved).grpo.group_size == 8
    assert "# override: grpo.group_size=8\n" in run.recipe.read_text()
    assert (run.identity.read_text(), run.attempts_ledger.read_text()) == (identity, "its ends\n")
    assert run.attempt(1).log(0).read_text() == "of before"
    left = {path.name for path in run.root.iterdir()}
    assert left == {".lock", "run.json", "recipe.yaml", "resolved.yaml", "attempts", "attempts.jsonl", "logs"}


@pytest.mark.parametrize("work", ["metrics", "damaged", "checkpoint", "done", "fork", "evaluation"])
def test_a_run_with_work_in_it_may_not_be_corrected(tmp_path, work):
    run = ask(tmp_path).run
    if work == "metrics":
        trained(tmp_path)
    elif work == "damaged":
        run.metrics.write_text("{torn\n")
    elif work == "checkpoint":
        run.checkpoint(1).mkdir(parents=True)
    elif work == "evaluation":
        (run.root / "evaluation.answers.jsonl").touch()
    else:
        getattr(run, work).touch()
    assert "grpo.group_size: 16 -> 8" in refusal(tmp_path, "grpo.group_size=8")


def test_a_correction_that_fails_leaves_all_as_it_was(tmp_path):
    run = ask(tmp_path).run
    run.evaluations.write_text("of before")
    before = {path: path.read_text() for path in (run.resolved, run.recipe, run.evaluations)}
    names = {path.name for path in run.root.iterdir()}
    fail(tmp_path, tmp_path, "grpo.group_size=8")
    assert {path: path.read_text() for path in before} == before
    assert {path.name for path in run.root.iterdir()} == names


def finish(root: Path, step: int) -> RunDir:
    run = RunDir(root)
    run.checkpoint(step).mkdir(parents=True)
    run.done.touch()
    return run


def test_a_finished_run_has_nothing_to_do(tmp_path):
    ask(tmp_path)
    finish(tmp_path, 800)
    assert ask(tmp_path).attempt is None


def test_more_steps_reopen_a_finished_run(tmp_path):
    ask(tmp_path)
    run = finish(tmp_path, 800)
    assert ask(tmp_path, "training.steps=900", change=True).attempt is not None
    assert not run.done.exists()


def test_more_patience_reopens_a_run_that_stopped_early(tmp_path):
    def of_rows(patience: int) -> OpenedRun:
        keys = ["data.held_out.share=0.1", f"training.early_stop.patience={patience}"]
        return prepare(load_recipe("demo-supervised", keys), tmp_path, change=True)

    of_rows(2)
    run = finish(tmp_path, 80)
    assert of_rows(4).attempt is not None
    assert not run.done.exists()


def test_fewer_steps_than_were_made_are_refused(tmp_path):
    ask(tmp_path)
    run = finish(tmp_path, 800)
    assert "already reached step 800" in refusal(tmp_path, "training.steps=700", change=True)
    assert run.done.exists()


def test_a_foreign_directory_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    assert "not a run directory" in refusal(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_empty_directory_will_do(tmp_path):
    assert ask(tmp_path).attempt is not None


def test_a_preparation_that_died_half_way_may_be_repeated(tmp_path):
    (tmp_path / ".lock").write_text("")
    assert ask(tmp_path).attempt is not None


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "file").write_text("")
    assert "is a file" in refusal(tmp_path / "file")
    assert "give a writable --run-dir" in refusal(tmp_path / "file" / "run")


def test_an_unwritable_place_is_refused():
    assert "give a writable --run-dir" in refusal(Path("/proc/run"))


def test_a_run_in_use_names_its_owner(tmp_path):
    ask(tmp_path)
    lock = RunLock(RunDir(tmp_path).lock, "the supervisor of attempt 1")
    text = refusal(tmp_path)
    lock.release()
    assert "the supervisor of attempt 1 (pid " in text


@pytest.mark.parametrize("content", ["", "{", "[]", '{"job_id": 7}'])
def test_an_owner_that_cannot_be_read_is_one(tmp_path, content):
    ask(tmp_path)
    RunDir(tmp_path).job.write_text(content)
    assert "job.json cannot be used" in refusal(tmp_path)


def test_new_run_directories_are_never_shared(tmp_path):
    paths = []
    for _ in range(3):
        with run_directory(None, "demo-1", tmp_path / "runs") as root:
            paths.append(root)
    assert [path.name for path in paths] == ["demo-1", "demo-1-2", "demo-1-3"]
    assert all(path.is_dir() for path in paths)


def fail(root: Path | None, parent: Path, *overrides: str, change: bool = False, handed_over: bool = False) -> None:
    recipe = load_recipe("demo", ["training.steps=800", "grpo.group_size=16", *overrides])
    with (
        pytest.raises(KeyboardInterrupt),
        run_directory(root, "demo", parent) as place,
        opened(recipe, place, change) as found,
    ):
        (found.run.root / "code-001").mkdir()
        found.run.code.symlink_to("code-001")
        found.handed_over = handed_over
        raise KeyboardInterrupt


def test_a_failure_leaves_no_new_run_behind(tmp_path):
    fail(None, tmp_path / "far" / "away")
    fail(tmp_path / "given" / "run", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_an_empty_directory_of_the_user(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    fail(mine, tmp_path)
    assert list(tmp_path.iterdir()) == [mine]
    assert list(mine.iterdir()) == []


def test_what_somebody_else_may_use_by_now_stays(tmp_path):
    fail(None, tmp_path / "runs", handed_over=True)
    assert RunDir(tmp_path / "runs" / "demo").resolved.is_file()


def test_a_failure_leaves_an_old_run_as_it_was(tmp_path):
    ask(tmp_path)
    run = finish(tmp_path, 800)
    before = {path: path.read_text() for path in (run.resolved, run.recipe, run.done)}
    fail(tmp_path, tmp_path, "training.steps=900", change=True)
    assert {path: path.read_text() for path in before} == before
    assert not run.changes.exists()
    assert not run.code.is_symlink()
    assert not (run.root / "code-001").exists()


def test_nobody_else_can_look_into_a_run_and_a_directory_of_the_users_own_stays_as_it_is(tmp_path):
    assert ask(tmp_path / "new").run.root.stat().st_mode & 0o777 == 0o700
    with run_directory(None, "it", tmp_path / "runs") as root:
        assert root.stat().st_mode & 0o777 == 0o700
    assert root.parent.stat().st_mode & 0o777 == 0o755
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o755)
    assert ask(mine).run.root.stat().st_mode & 0o777 == 0o755


REWARD = "def reward(response, **columns):\n    return 0.0\n"


def own_reward(folder: Path) -> Path:
    """A recipe with a reward of the user's own, and its files beside it."""
    (folder / "reward.py").write_text(REWARD)
    (folder / "mine.jsonl").write_text('{"prompt": "1+1="}\n')
    recipe = folder / "mine.yaml"
    recipe.write_text(
        load_recipe("demo")
        .text.replace("name: arithmetic", "name: python")
        .replace("args: {}", "args: {file: reward.py, train: mine.jsonl}")
    )
    return recipe


def test_a_run_keeps_its_own_copy_of_a_reward_file(tmp_path: Path) -> None:
    recipe, root = own_reward(tmp_path), tmp_path / "run"
    run = prepare(load_recipe(str(recipe)), root, change=False).run
    task = with_kept_files(read_resolved(run.resolved).task, run)
    copy = Path(task.args["file"])
    assert copy.is_relative_to(root) and copy.name == "reward.py"
    assert task.args["train"] == {"path": str(tmp_path / "mine.jsonl")}
    [kept] = read(KeptFiles, run.kept_files_record).files
    assert (kept.path, kept.sha256) == (str(tmp_path / "reward.py"), hashlib.sha256(REWARD.encode()).hexdigest())
    run.metrics.write_text(encode_line(MetricsLine(1, {})) + "\n")
    (tmp_path / "reward.py").write_text(REWARD + "# another\n")
    resumed = load_recipe(str(run.resolved))  # as mrl resume does
    assert prepare(resumed, root, change=False).changes == ()
    assert Path(with_kept_files(resumed.config.task, run).args["file"]) == copy
    [changed] = prepare(resumed, root, change=True).changes
    assert (changed.key, changed.old) == ("files.reward.py", kept.sha256)
    assert Path(with_kept_files(resumed.config.task, run).args["file"]).read_text() == REWARD + "# another\n"
    (tmp_path / "reward.py").unlink()
    assert prepare(load_recipe(str(run.resolved)), root, change=True).changes == ()
    [recorded] = read_lines(RecipeChange, run.changes).records
    assert recorded.changes == {"files.reward.py": [kept.sha256, changed.new]}


def test_a_run_keeps_the_modules_beside_a_file_that_it_imports(tmp_path: Path) -> None:
    recipe, root = own_reward(tmp_path), tmp_path / "run"
    (tmp_path / "reward.py").write_text(f"import json\nfrom helpers import right\n{REWARD}")
    (tmp_path / "helpers.py").write_text("def right():\n    import deeper\n")
    for name in ("deeper", "json", "unused"):
        (tmp_path / f"{name}.py").write_text("")
    run = prepare(load_recipe(str(recipe)), root, change=False).run
    [kept] = read(KeptFiles, run.kept_files_record).files
    copies = (run.kept_files / kept.name).parent
    assert sorted(each.name for each in copies.iterdir()) == ["deeper.py", "helpers.py", "reward.py"]
    assert [*kept.beside] == ["deeper.py", "helpers.py"]
    run.metrics.write_text(encode_line(MetricsLine(1, {})) + "\n")
    (tmp_path / "deeper.py").write_text("# another\n")
    [changed] = prepare(load_recipe(str(run.resolved)), root, change=True).changes
    assert (changed.key, changed.old) == ("files.deeper.py", kept.beside["deeper.py"])
    [kept] = read(KeptFiles, run.kept_files_record).files
    assert (run.kept_files / kept.name).with_name("deeper.py").read_text() == "# another\n"


def test_a_run_in_which_nothing_was_trained_takes_a_corrected_reward_file(tmp_path: Path) -> None:
    recipe = load_recipe(str(own_reward(tmp_path)))
    run = prepare(recipe, tmp_path / "run", change=False).run
    (tmp_path / "reward.py").write_text(REWARD + "# corrected\n")
    prepare(recipe, run.root, change=False)
    assert Path(with_kept_files(recipe.config.task, run).args["file"]).read_text() == REWARD + "# corrected\n"


def test_a_failed_start_leaves_no_copy(tmp_path: Path) -> None:
    recipe, run = load_recipe(str(own_reward(tmp_path))), RunDir(tmp_path / "run")
    run.root.mkdir()
    run.lock.write_text("")  # so that it is a run's already, and not removed as a whole
    with pytest.raises(RuntimeError), opened(recipe, run.root, change=False):
        raise RuntimeError
    assert not run.kept_files.exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no such file or directory"),
        ("def score(): ...", "defines no function reward"),
        ("def", "not valid Python"),
    ],
)
def test_a_reward_file_that_cannot_be_used_is_refused_with_the_recipe(tmp_path: Path, text: str, said: str) -> None:
    recipe = own_reward(tmp_path)
    if text is None:
        (tmp_path / "reward.py").unlink()
    else:
        (tmp_path / "reward.py").write_text(text)
    with pytest.raises(BadInput, match=rf"mine.yaml:[0-9]+: {tmp_path}/reward.py.*{said}"):
        load_recipe(str(recipe))
