"""Comparison of runs: keys that differ, metrics at the end, the best."""

from __future__ import annotations

from typing import Any

from launcher.explain.record import Record
from launcher.report.compare import ComparedRun, compare, value_at_end
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
