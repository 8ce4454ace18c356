"""Curves of several runs over one another."""

from __future__ import annotations

from launcher.explain.record import Record
from launcher.report.charts import MOST_CURVES, Chart
from launcher.report.compare import ComparedRun, overlaid
from megatron_rl.contract.attempt_records import MetricsLine


def run(name: str, steps: int, reward: float) -> ComparedRun:
    lines = [MetricsLine(step, {"mean_reward": reward * step / steps}) for step in range(1, steps + 1)]
    evaluations = [MetricsLine(0, {"eval/held_out/pass@8": 0.1}), MetricsLine(steps, {"eval/held_out/pass@8": reward})]
    return ComparedRun(name, f"/runs/{name}", "finished", Record({}, lines, evaluations))


def charts(*runs: ComparedRun) -> dict[str, Chart]:
    return {chart.title: chart for group in overlaid(runs) for chart in group.charts}


def test_each_metric_has_a_curve_for_each_run_whatever_their_lengths():
    reward = charts(run("short", 5, 0.4), run("long", 20, 0.8))["Reward"]
    named = {curve.label: curve.values for curve in reward.curves}
    assert reward.steps == list(range(1, 21))
    assert named["short"][4:6] == [0.4, None]
    assert named["long"][19] == 0.8


def test_evaluations_are_the_first_charts():
    found = charts(run("a", 5, 0.4), run("b", 5, 0.8))
    assert list(found) == ["Held out, pass@8", "Reward"]
    assert [curve.values for curve in found["Held out, pass@8"].curves] == [[0.1, 0.4], [0.1, 0.8]]
    assert found["Held out, pass@8"].unit == "share"


def test_runs_of_one_name_are_different_curves_and_runs_beyond_the_colours_are_counted():
    found = charts(*(run("same", 5, place / 10 + 0.1) for place in range(MOST_CURVES + 2)))["Reward"]
    assert len({tuple(curve.values) for curve in found.curves}) == MOST_CURVES
    assert found.left_out == 2
