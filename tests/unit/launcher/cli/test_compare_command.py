"""mrl report of several runs: by name or folder, as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from run_helpers import make_run

from launcher.cli.main import main
from launcher.cli.show import comparison
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.records import append

pytestmark = pytest.mark.usefixtures("no_clusters_of_the_user")


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    for name, rate, reward in (("a", "1e-3", 0.25), ("b\x1b[31m", "2e-3", 0.5)):
        run = make_run(tmp_path / "sweep" / name, f"optimizer.learning_rate={rate}")
        for step in range(1, 13):
            append(run.metrics, MetricsLine(step, {"mean_reward": reward, "entropy": 1.5}))
    (tmp_path / "sweep" / "notes").mkdir()
    return tmp_path / "sweep"


def compared(*words: str | Path) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, words)])


def test_the_runs_of_a_folder_are_listed_with_what_differs_the_best_first(sweep: Path):
    found = compared(sweep)
    assert found.exit_code == 0, found.output
    header, best, other = [line.split() for line in found.output.splitlines()[:3]]
    assert header == ["run", "state", "step", "mean_reward", "entropy", "learning_rate"]
    assert best == ["b\\x1b[31m", "new", "12", "0.5", "1.5", "0.002"]
    assert other == ["a", "new", "12", "0.25", "1.5", "0.001"]
    assert found.output.splitlines()[-1] == (
        "best by mean_reward (highest, mean of the last 10 steps): b\\x1b[31m, 0.5; next: a, 0.25"
    )


def test_json_has_the_runs_in_the_same_order(sweep: Path):
    found = json.loads(compared(sweep / "a", sweep, "--by", "mean_reward", "--lowest", "--json").output)
    assert (found["by"], found["lowest"], found["best"]) == ("mean_reward", True, "a")
    assert found["keys"] == ["optimizer.learning_rate"]
    assert [row["metrics"]["mean_reward"] for row in found["runs"]] == [0.25, 0.5]
    assert found["runs"][0]["run_dir"] == str(sweep / "a")


def test_equal_recipes_are_said_to_be_equal(sweep: Path):
    (sweep / "b\x1b[31m" / "resolved.yaml").write_bytes((sweep / "a" / "resolved.yaml").read_bytes())
    assert "the recipes are equal" in compared(sweep).output


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["{sweep}", "--by", "reward"], "--by reward: no run has this metric; newest steps have entropy, mean_reward"),
        (["{sweep}/notes"], "is not a run, and has none in it"),
        (["nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_one_error(sweep: Path, words: list[str], error: str):
    found = compared(*(word.format(sweep=sweep) for word in words))
    assert found.exit_code == 2
    assert error in " ".join(found.output.split())


def test_the_beginning_of_several_names_stands_for_all_of_these_and_logs_are_passed_over(tmp_path: Path):
    for seed in (1, 2):
        run = make_run(tmp_path / f"demo-20261128_seed={seed}", f"training.seed={seed}")
        append(run.metrics, MetricsLine(1, {"mean_reward": seed / 10}))
        run.batch_log.touch()
    make_run(tmp_path / "other")
    both = compared(tmp_path / "demo-20261128")
    assert both.exit_code == 0, both.output
    assert [line.split()[0] for line in both.output.splitlines()[1:3]] == ["seed=2", "seed=1"]
    globbed = compared(*sorted(tmp_path.glob("demo-*")))
    assert globbed.exit_code == 0
    assert globbed.output == both.output


def test_runs_that_differ_in_many_keys_say_what_is_left_out(sweep: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(comparison, "MOST_KEYS", 1)
    append(
        make_run(sweep / "other", "training.steps=30", "training.seed=3").metrics, MetricsLine(1, {"mean_reward": 0.1})
    )
    assert "2 more keys differ: --json has all of them" in compared(sweep).output
