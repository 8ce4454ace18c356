"""mrl plan --simulate: whole runs with failures, as a table and as JSON."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from launcher.cli.arguments import Lags
from launcher.cli.plan import command

SIMULATED = ("qwen2.5-32b-dapo", "--cluster", "h100", "grpo.prompts_per_step=8", "grpo.global_batch=128", "--simulate")
FAST = ("--steps", "6", "--preempt-every", "0.05", "--node-fails-every", "2")
pytestmark = pytest.mark.usefixtures("no_clusters_of_the_user")


@pytest.fixture(autouse=True)
def few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Co-located and half and half only, to save time."""
    monkeypatch.setattr("launcher.simulate.splits.MOST_SPLITS", 2)


def mrl_plan(*arguments: str) -> Result:
    return CliRunner().invoke(command, [*SIMULATED, *arguments])


def test_runs_are_shown_co_located_and_at_each_lag():
    result = mrl_plan(*FAST, "--max-lag", "0,2")
    assert result.exit_code == 0, result.output
    assert "simulated, not measured: qwen2.5-32b-dapo, estimated for H100" in result.stdout
    assert "6 steps, preempted every 0.05 h with 120 s of notice and 10 min in the queue" in result.stdout
    rows = [line.split("  ")[0] for line in result.stdout.splitlines()[2:6]]
    assert rows == ["co-located, lag 0", "co-located, lag 2", "lag 0", "lag 2"]


def test_json_has_the_figures_of_each_run():
    runs = json.loads(mrl_plan(*FAST, "--max-lag", "0,2", "--json").stdout)["runs"]
    assert [run["mode"] for run in runs] == ["co-located, lag 0", "co-located, lag 2", "lag 0", "lag 2"]
    assert [run["split"]["inference_nodes"] for run in runs] == [0, 0, 4, 4]
    for run in runs:
        assert run["staleness_max"] <= run["max_lag"]
        assert 0 < run["goodput"] < 1
    assert any(run["attempts"] > 1 for run in runs)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("demo", "--steps", "2"), "--steps: this option describes simulated runs; add --simulate"),
        (("demo", "--simulate"), "speeds of CPUs are not estimated"),
        ((*SIMULATED, "--preempt-every", "0"), "--preempt-every"),
        ((*SIMULATED, "training.tokens_per_microbatch=300000", "placement.offload=none"), "no split of these nodes"),
    ],
)
def test_impossible_simulations_are_refused(arguments, error):
    result = CliRunner().invoke(command, list(arguments))
    assert (result.exit_code, error in result.output) == (2, True), result.output


def test_lags_are_sorted_without_repeats():
    assert Lags().convert("2,0,2", None, None) == (0, 2)
