"""mrl compare: runs by name or folder, as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from run_helpers import make_run

from launcher.cli.main import main
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
    return CliRunner().invoke(main, ["compare", *map(str, words)])


def test_the_runs_of_a_folder_are_listed_with_what_differs_the_best_first(sweep: Path):
    found = compared(sweep)
    assert found.exit_code == 0, found.output
    header, best, other = [line.split() for line in found.output.splitlines()[:3]]
    assert header == ["run", "learning_rate", "state", "step", "mean_reward", "entropy"]
    assert best == ["b\\x1b[31m", "0.002", "new", "12", "0.5", "1.5"]
    assert other == ["a", "0.001", "new", "12", "0.25", "1.5"]
    assert found.output.splitlines()[-1] == (
        "best by mean_reward (highest, mean of the last 10 steps): b\\x1b[31m, 0.5"
    )


def test_json_has_the_runs_in_the_same_order(sweep: Path):
    found = json.loads(compared(sweep / "a", sweep, "--by", "mean_reward", "--lowest", "--json").output)
    assert (found["by"], found["lowest"], found["best"]) == ("mean_reward", True, "a")
    assert found["keys"] == ["optimizer.learning_rate"]
    assert [row["metrics"]["mean_reward"] for row in found["runs"]] == [0.25, 0.5]
    assert found["runs"][0]["run_dir"] == str(sweep / "a")


def test_equal_recipes_are_said_to_be_equal(sweep: Path):
    assert "the recipes are equal" in compared(sweep / "a").output


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["{sweep}", "--by", "reward"], "--by reward: no run has this metric; newest steps have entropy, mean_reward"),
        (["{sweep}/notes"], "is no run, and has none in it"),
        (["nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_one_error(sweep: Path, words: list[str], error: str):
    found = compared(*(word.format(sweep=sweep) for word in words))
    assert found.exit_code == 2
    assert error in " ".join(found.output.split())
