"""Siblings of a run: those of the same recipe in the same folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.explain.record import read_record
from launcher.recipe.load import dump_resolved, load_recipe
from launcher.report import siblings
from launcher.report.siblings import Siblings, near, read_siblings
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import append


def make_run(folder: Path, name: str, reward: float, recipe: str = "demo", age: float = 0.0, *overrides: str) -> RunDir:
    run = RunDir(folder / name)
    run.root.mkdir()
    values = dump_resolved(load_recipe("demo", [f"name={recipe}", *overrides]).config)
    run.resolved.write_text(values, encoding="utf-8")
    os.utime(run.resolved, (1e9 - age, 1e9 - age))
    for step in range(1, 12):
        append(run.metrics, MetricsLine(step, {"mean_reward": reward}))
    return run


def siblings_of(run: RunDir) -> Siblings | None:
    unread: list[str] = []
    found = read_siblings(run, read_record(run), unread)
    assert unread == []
    return found


def test_runs_of_the_same_recipe_in_the_folder_are_compared_with_the_run(tmp_path: Path):
    run = make_run(tmp_path, "b", 0.5)
    make_run(tmp_path, "a", 0.75, "demo", 0.0, "grpo.kl_beta=0.1")
    make_run(tmp_path, "other-recipe", 0.99, "else")
    (tmp_path / "no-run").mkdir()
    found = siblings_of(run)
    assert [one.name for one in found.comparison.runs] == ["b", "a"]
    assert found.comparison.keys == {"grpo.kl_beta": [0.0, 0.1]}
    assert found.comparison.metrics["mean_reward"] == [0.5, 0.75]
    assert (found.place, found.left_out, found.not_looked_at) == (2, 0, 0)


def test_a_run_alone_has_no_siblings(tmp_path: Path):
    assert siblings_of(make_run(tmp_path, "only", 0.5)) is None


def test_of_many_siblings_the_newest_are_read_and_the_others_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(siblings, "MOST", 2)
    monkeypatch.setattr(siblings, "MOST_LOOKED_AT", 4)
    run = make_run(tmp_path, "run-5", 0.5)
    for place in (1, 2, 3, 4, 6):
        make_run(tmp_path, f"run-{place}", 0.1, "demo", float(place))
    found = siblings_of(run)
    assert [one.name for one in found.comparison.runs] == ["run-5", "run-2", "run-3"]  # run-1 was not looked at
    assert (found.left_out, found.not_looked_at) == (2, 1)


def test_siblings_that_cannot_be_read_are_left_out(tmp_path: Path):
    run = make_run(tmp_path, "good", 0.5)
    make_run(tmp_path, "half", 0.5).metrics.write_bytes(b'{"step": 1, "mean_rew')
    torn = make_run(tmp_path, "torn", 0.5)
    torn.resolved.write_text("name: demo\ngrpo: [", encoding="utf-8")
    found = siblings_of(run)
    assert [one.name for one in found.comparison.runs] == ["good", "half"]
    assert found.comparison.metrics["mean_reward"] == [0.5, None]
    assert found.left_out == 1


def test_the_entries_nearest_by_name_are_looked_at():
    names = ["a", "b", "d", "e", "f"]
    assert near(names, "c", 2) == ["b", "d"]
    assert near(names, "0", 2) == ["a", "b"]
    assert near(names, "z", 3) == ["d", "e", "f"]
    assert near(names, "c", 9) == names
