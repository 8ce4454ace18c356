"""Comparison of runs: keys that differ, metrics at the end, the best."""

from __future__ import annotations

from typing import Any

from launcher.explain.record import Record
from launcher.report.charts import MOST_CURVES, Chart
from launcher.report.compare import ComparedRun, compare, differing, labels, overlaid, value_at_end, verdict
from megatron_rl.contract.attempt_records import MetricsLine


def run(name: str, rewards: list[float], evaluated: float | None = None, **keys: Any) -> ComparedRun:
    lines = [
        MetricsLine(step, {"mean_reward": reward, "time/step_s": reward + 1}) for step, reward in enumerate(rewards, 1)
    ]
    evaluations = [] if evaluated is None else [MetricsLine(0, {"eval/a/greedy_accuracy": evaluated})]
    recipe = {"name": name, "grpo": {"group_size": 8, **keys}}
    return ComparedRun(name, f"/runs/{name}", "finished", Record(recipe, lines, evaluations))


def test_the_value_at_the_end_is_the_mean_of_the_last_ten_steps_or_the_newest_evaluation():
    record = run("a", [9.0, *range(10)], 0.5).record
    assert value_at_end(record, "mean_reward") == 4.5
    assert value_at_end(record, "eval/a/greedy_accuracy") == 0.5
    assert value_at_end(record, "kl") is None
    assert value_at_end(run("a", [2.0, 4.0]).record, "mean_reward") == 3.0


def test_runs_are_ordered_from_best_to_worst_and_those_without_a_value_are_last():
    runs = [run("low", [0.1]), run("new", []), run("high", [0.9])]
    found = compare(runs)
    assert [runs[at].name for at in found.order] == ["high", "low", "new"]
    assert found.best == 2
    assert [runs[at].name for at in compare(runs, lowest=True).order] == ["low", "high", "new"]
    assert compare(runs, "kl").best is None


def test_of_times_and_losses_the_lowest_is_the_best():
    runs = [run("slow", [0.9]), run("fast", [0.1])]
    found = compare(runs, "time/step_s")
    assert (found.lowest, found.best) == (True, 1)
    assert not compare(runs).lowest


def test_only_keys_that_differ_and_metrics_that_exist_are_in_the_comparison():
    found = compare([run("a", [0.1], 0.5, kl_beta=0.0), run("b", [0.2], kl_beta=0.1)])
    assert found.keys == {"grpo.kl_beta": [0.0, 0.1]}
    assert found.metrics["eval/a/greedy_accuracy"] == [0.5, None]
    assert "entropy" not in found.metrics
    assert next(iter(found.metrics)) == "mean_reward"


def test_names_are_shortened_to_what_differs_and_stay_different():
    sweep = [f"demo-20261128-101010_group_size={size}_seed=1" for size in (8, 16)]
    assert labels(sweep, 32) == ["size=8", "size=16"]
    assert labels(["a", "b"], 32) == ["a", "b"]
    assert labels(["first-run", "second-run"], 32) == ["first", "second"]
    assert labels(["only-one"], 32) == ["only-one"]
    cut = labels(["x" * 60, "y" * 60], 20)
    assert cut == ["x" * 9 + "…" + "x" * 10, "y" * 9 + "…" + "y" * 10]
    alike = labels(["x" * 30 + "1" + "x" * 30, "x" * 30 + "2" + "x" * 30], 20)
    assert len(set(alike)) == 2


def test_the_verdict_names_the_best_and_the_next_and_says_when_that_is_noise():
    clear = compare([run("low", [0.1, 0.12] * 5), run("high", [0.9, 0.92] * 5)])
    assert verdict(clear) == "best by mean_reward (highest, mean of the last 10 steps): high, 0.91; next: low, 0.11"
    close = compare([run("one", [0.1, 0.3] * 5), run("other", [0.12, 0.3] * 5)])
    assert "(no more than noise: 2 standard errors are 0.09" in verdict(close)
    assert "next" not in verdict(compare([run("alone", [0.1])]))


def test_of_equally_good_runs_none_is_the_best():
    found = compare([run("a", [0.5] * 10), run("low", [0.1]), run("b", [0.5] * 10), run("new", [])])
    assert found.best is None
    assert verdict(found) == "best by mean_reward (highest, mean of the last 10 steps): a and b are equal, 0.5"


def test_keys_that_differ_between_runs_are_listed_with_the_value_of_each():
    runs = [{"name": "a", "grpo": {"eps": 1}}, {"name": "b", "grpo": {"eps": 2}}, {"grpo": {"eps": 1}, "seed": 3}]
    assert differing(runs) == {"grpo.eps": [1, 2, 1], "seed": [None, None, 3]}


def rising(name: str, steps: int, reward: float) -> ComparedRun:
    return run(name, [reward * step / steps for step in range(1, steps + 1)], reward)


def charts(*runs: ComparedRun) -> dict[str, Chart]:
    return {chart.title: chart for group in overlaid(runs) for chart in group.charts}


def test_each_metric_has_a_curve_for_each_run_whatever_their_lengths():
    reward = charts(rising("short", 5, 0.4), rising("long", 20, 0.8))["Reward"]
    named = {curve.label: curve.values for curve in reward.curves}
    assert reward.steps == list(range(1, 21))
    assert named["short"][4:6] == [0.4, None]
    assert named["long"][19] == 0.8


def test_evaluations_are_the_first_charts():
    found = charts(rising("a", 5, 0.4), rising("b", 5, 0.8))
    assert list(found)[:2] == ["A, greedy accuracy", "Reward"]
    assert [curve.values for curve in found["A, greedy accuracy"].curves] == [[0.4], [0.8]]
    assert found["A, greedy accuracy"].unit == "share"


def test_runs_of_one_name_are_different_curves_and_runs_beyond_the_colours_are_counted():
    found = charts(*(rising("same", 5, place / 10 + 0.1) for place in range(MOST_CURVES + 2)))["Reward"]
    assert len({tuple(curve.values) for curve in found.curves}) == MOST_CURVES
    assert found.left_out == 2
