"""mrl plan --simulate: whole runs with faults, as a table, as JSON, and as files."""

from __future__ import annotations

import json
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from launcher.cli.arguments import Counts
from launcher.cli.plan import command

SIMULATED = ("qwen2.5-32b-dapo", "--cluster", "h100", "grpo.prompts_per_step=8", "grpo.global_batch=128", "--simulate")
FAST = ("--steps", "6", "--seeds", "2", "--preempt-every", "0.1", "--node-fails-every", "2")
pytestmark = pytest.mark.usefixtures("no_clusters_of_the_user")


@pytest.fixture(autouse=True)
def few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half and half, so that it takes no time."""
    monkeypatch.setattr("launcher.simulate.splits.MOST_SPLITS", 2)


def mrl_plan(*arguments: str) -> Result:
    return CliRunner().invoke(command, [*SIMULATED, *arguments])


def test_each_count_of_nodes_is_told_co_located_and_at_each_lag_with_files_and_charts(tmp_path: Path):
    out = tmp_path / "new" / "folder"
    result = mrl_plan(*FAST, "--nodes", "4-8", "--max-lag", "0,2", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "simulation, nothing was measured: qwen2.5-32b-dapo, estimated for H100" in result.stdout
    assert [line.split()[0] for line in result.stdout.splitlines() if " ± " in line] == ["32"] * 3 + ["64"] * 3
    found = json.loads((out / "simulation.json").read_text())
    assert [(one["gpus"], one["mode"]) for one in found["points"]] == [
        (gpus, mode) for gpus in (32, 64) for mode in ("co-located", "lag 0", "lag 2")
    ]
    for one in found["points"]:
        assert one["figures"]["staleness_max"]["high"] <= one["max_lag"]
        assert 0 < one["figures"]["goodput"]["low"] <= one["figures"]["goodput"]["high"] < 1
    assert any(one["figures"]["attempts"]["high"] > 1 for one in found["points"])
    for chart in ("step", "tokens", "goodput"):
        text = [*xml.parse(out / f"{chart}.svg").getroot().itertext()]
        assert any(line.startswith("simulation: estimated for H100") for line in text)
        assert {"co-located", "lag 0", "lag 2", "32", "64"} <= set(text)
    assert "Nothing here was measured" in (out / "simulation.md").read_text()


def test_a_batch_that_grows_with_the_nodes_keeps_their_shares():
    result = mrl_plan("--steps", "3", "--seeds", "1", "--nodes", "16", "--grow-batch", "--max-lag", "1", "--json")
    colocated, apart = json.loads(result.stdout)["points"]
    assert (colocated["prompts"], apart["prompts"]) == (16, 16)
    assert (apart["split"]["training_nodes"], apart["split"]["inference_nodes"]) == (8, 8)


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (("--nodes", "x"), 2, "'x' is neither numbers such as 0,1,2 nor doublings such as 8-64"),
        (("--nodes", "64", "--steps", "1"), 2, "--nodes: none of these counts gives a layout that fits"),
        (("--preempt-every", "0"), 2, "--preempt-every"),
        (("--nodes", "8", "--steps", "1", "--seeds", "1", "--out", "/dev/null/x"), 1, "--out /dev/null/x: Not a"),
    ],
)
def test_what_cannot_be_simulated_or_written_is_refused(arguments, code, error):
    result = mrl_plan(*arguments)
    assert (result.exit_code, error in result.output) == (code, True)


def test_options_of_a_simulation_need_one():
    result = CliRunner().invoke(command, ["demo", "--seeds", "2"])
    assert (result.exit_code, "--seeds: is about simulated runs: add --simulate" in result.output) == (2, True)
    result = CliRunner().invoke(command, ["demo", "--simulate"])
    assert (result.exit_code, "only a run can tell" in result.output) == (2, True)


@pytest.mark.parametrize(("text", "counts"), [("8-70", (8, 16, 32, 64)), ("3", (3,)), ("2,0,2", (0, 2)), ("5-5", (5,))])
def test_counts_are_a_list_or_doublings(text, counts):
    assert Counts(0, 100).convert(text, None, None) == counts
