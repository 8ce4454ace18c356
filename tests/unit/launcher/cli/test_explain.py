"""mrl explain: findings of a run directory, as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from launcher.cli.explain import command
from launcher.recipe.load import dump_resolved, load_recipe
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import append

pytestmark = pytest.mark.usefixtures("no_clusters_of_the_user")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of the demo whose answers are all wrong from its eleventh step on."""
    found = RunDir(tmp_path / "flat")
    found.root.mkdir()
    found.resolved.write_text(dump_resolved(load_recipe("demo").config), encoding="utf-8")
    for step in range(1, 31):
        reward = 0.25 if step <= 10 else 0.0
        values = {
            "mean_reward": reward,
            "right_ratio": reward,
            "reward_std": reward,
            "nonzero_groups_ratio": 2 * reward,
            "learning_rate": 1e-3,
            "loss": 0.0,
        }
        append(found.metrics, MetricsLine(step, values))
    return found


def printed(run: RunDir, *options: str, code: int = 0) -> str:
    result = CliRunner().invoke(command, [str(run.root), *options], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def test_evidence_and_what_to_try_are_printed_below_the_name_of_each_rule(run: RunDir):
    text = printed(run)
    assert "flat: 30 of 900 steps" in text
    assert "reward                          0.25 -> 0" in text
    assert (
        "constant-rewards, since step 11\n  seen  Every answer of the last 10 steps earned the same reward, 0." in text
    )
    assert "  try   Check the reward function" in text


def test_json_has_the_findings_and_all_rules(run: RunDir):
    told = json.loads(printed(run, "--json"))
    found = {one["rule"]: one for one in told["findings"]}
    assert found["constant-rewards"]["since"] == 11
    assert found.keys() < set(told["rules"])
    assert told["step"] == 30


def test_a_record_that_cannot_be_read_is_named(run: RunDir):
    run.metrics.unlink()
    run.metrics.mkdir()
    assert "metrics.jsonl cannot be used: is not a regular file" in printed(run, code=1)
