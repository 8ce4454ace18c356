"""mrl status of a partitioned run: idle shares, and a split that should be faster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from launcher.cli.plan import command as mrl_plan
from launcher.cli.status import command as mrl_status
from launcher.recipe.load import dump_resolved, load_recipe
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import append

pytestmark = pytest.mark.usefixtures("no_clusters_of_the_user")


def partitioned(folder: Path, busy: float) -> RunDir:
    run = RunDir(folder / "a run")
    run.root.mkdir()
    asked = ["placement.mode=partitioned", "job.nodes=8", "placement.inference.nodes=4"]
    run.resolved.write_text(dump_resolved(load_recipe("demo", asked).config), encoding="utf-8")
    for step in range(1, 6):
        values = {"time/step_s": 10.0, "time/generate_s": 7.0, "time/train_s": 3.0, "answer_length": 3.0}
        values |= {"answer_length_max": 3, "truncated_ratio": 1.0, "prompt_length": 4.0, "staleness_max": 1}
        append(run.metrics, MetricsLine(step, values | {"system/replica_busy_mean": busy}))
    return run


def told(run: RunDir) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(CliRunner().invoke(mrl_status, [str(run.root), "--json"]).stdout)
    return found


def test_a_faster_split_is_named_with_a_command_for_details(tmp_path: Path):
    run = partitioned(tmp_path, busy=1.0)
    assert told(run)["idle"] == {
        "training": 0.7,
        "inference": 0.0,
        "steps": 5,
        "better": {"training_nodes": 2, "inference_nodes": 6, "saves": pytest.approx(1 / 3)},
    }
    text = " ".join(CliRunner().invoke(mrl_status, [str(run.root)]).stdout.split())
    expected = "idle training ranks 70%, replicas 0% of the last 5 steps; 2 + 6 nodes might take 33% less: mrl plan "
    assert expected + f"'{run.resolved}' --measured '{run.root}'" in text
    plan = CliRunner().invoke(mrl_plan, [str(run.resolved), "--measured", str(run.root)])
    assert "step time by split, as measured in 4 steps of a run" in plan.stdout


def test_a_good_split_is_not_commented_and_damage_is_reported(tmp_path: Path):
    run = partitioned(tmp_path, busy=0.3)
    assert told(run)["idle"]["better"] is None
    run.resolved.write_text("job: {}\n", encoding="utf-8")
    assert any("does not say how the nodes are split" in problem for problem in told(run)["unread"])


def test_co_located_runs_show_no_idle_shares(tmp_path: Path):
    run = partitioned(tmp_path, busy=0.3)
    run.metrics.unlink()
    assert told(run)["idle"] is None
